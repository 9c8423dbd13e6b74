"""Tables in host memory: rows with their optimizer state, one array per row layout."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from recsys_offload.embedding.config import Placement, SparseOptimizerSettings
from recsys_offload.embedding.host_memory import allocate
from recsys_offload.embedding.kernels.host_init import fill_uniform
from recsys_offload.embedding.optimizers import state_columns
from recsys_offload.embedding.threads import KernelThreads

FLOAT_BYTES = 4


@dataclass
class TableGroup:
    """The tables of one row layout, one below the other in one array.

    Attributes:
        dim: weights per row.
        placement: ``device``, ``cached`` or ``host``.
        state: the optimizer's state per row: name -> columns ``[first, last)`` of ``rows``.
        tables: table -> (first row, number of rows).
        rows: float32 ``[R, W]``: weights in the first ``dim`` columns, state behind them.
        last_number: int32 ``[R]``, the planner's memory (see ``kernels/host_plan.py``).
    """

    dim: int
    placement: Placement
    state: dict[str, tuple[int, int]]
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    last_number: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def row_count(self) -> int:
        return sum(count for _, count in self.tables.values())

    @property
    def width(self) -> int:
        return max((last for _, last in self.state.values()), default=self.dim)

    @property
    def row_bytes(self) -> int:
        return self.width * FLOAT_BYTES

    def add(self, name: str, rows: int) -> None:
        self.tables[name] = (self.row_count, rows)

    def table_rows(self, name: str) -> np.ndarray:
        first, count = self.tables[name]
        return self.rows[first : first + count]


def _check(config: BaseEmbeddingConfig) -> None:
    if config.num_embeddings < 1 or config.embedding_dim < 1:
        raise ValueError(
            f"table {config.name!r}: num_embeddings and embedding_dim must be at least 1, "
            f"not {config.num_embeddings} and {config.embedding_dim}"
        )
    if config.data_type != DataType.FP32:
        raise ValueError(f"table {config.name!r}: data_type must be FP32 for tables in host memory")


class HostTables:
    """Embedding tables and their optimizer state in host memory.

    A row's weights and state lie side by side, so that an update touches one place, and a row can move as a whole.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        optimizer: SparseOptimizerSettings,
        seed: int,
        threads: KernelThreads,
        pin: bool,
        memory_limit: int | None = None,
        placements: Mapping[str, Placement] | None = None,
        own_caches: Collection[str] = (),
    ) -> None:
        """Allocates and initialises the tables.

        Args:
            configs: TorchRec's description of each table, names distinct.
            optimizer: whose state the rows carry.
            seed: of the initial values, which depend on it and the table's name only.
            threads: that fill the tables.
            pin: register the memory with the device.
            memory_limit: bytes that all rows with their state may take.
            placements: table -> ``device``, ``cached`` or ``host``; ``host`` where it is not named.
            own_caches: tables that share no group with others, so that each can have a cache of its own.

        Raises:
            ValueError: a table is described twice, has no rows or columns, or a type that is not supported.
            MemoryError: the tables do not fit in host memory, or not in ``memory_limit``.
        """
        self.step = 0
        self._one_value_per_row = optimizer.name == "rowwise_adagrad"
        self.groups: list[TableGroup] = []
        self._group_of: dict[str, TableGroup] = {}
        groups: dict[tuple[int, Placement, str | None], TableGroup] = {}
        for config in configs:
            _check(config)
            if config.name in self._group_of:
                raise ValueError(f"table {config.name!r} is described twice")
            dim, placement = config.embedding_dim, (placements or {}).get(config.name, "host")
            key = (dim, placement, config.name if config.name in own_caches else None)
            group = groups.setdefault(key, self._new_group(dim, placement, optimizer))
            group.add(config.name, config.num_embeddings)
            self._group_of[config.name] = group
        self.groups = list(groups.values())
        size = sum(group.row_count * group.width for group in self.groups) * np.dtype(np.float32).itemsize
        if memory_limit is not None and size > memory_limit:
            raise MemoryError(
                f"the tables with their {optimizer.name} state take {size / 2**30:.2f} GiB, more than the memory_limit "
                f"of {memory_limit / 2**30:.2f} GiB: raise it, use fewer or smaller tables, or an optimizer with less "
                "state"
            )
        for group in self.groups:
            names = ", ".join(list(group.tables)[:3]) + (", ..." if len(group.tables) > 3 else "")
            purpose = f"the group of {len(group.tables)} tables of dim {group.dim} ({names})"
            group.rows = allocate((group.row_count, group.width), np.dtype(np.float32), purpose, pin)
            group.last_number = allocate((group.row_count,), np.dtype(np.int32), f"the planner's memory for {purpose}")
        for config in configs:
            self._initialise(config, optimizer, seed, threads)

    @staticmethod
    def _new_group(dim: int, placement: Placement, optimizer: SparseOptimizerSettings) -> TableGroup:
        state, first = {}, dim
        for name, columns in state_columns(optimizer.name, dim).items():
            state[name] = (first, first + columns)
            first += columns
        return TableGroup(dim, placement, state)

    def _initialise(
        self, config: BaseEmbeddingConfig, optimizer: SparseOptimizerSettings, seed: int, threads: KernelThreads
    ) -> None:
        group = self._group_of[config.name]
        init = config.init_fn
        if isinstance(init, partial) and init.func is torch.nn.init.uniform_:
            digest = hashlib.sha256(f"{seed}/{config.name}".encode()).digest()
            table_seed = np.uint64(int.from_bytes(digest[:8], "little"))
            low, high = float(init.keywords["a"]), float(init.keywords["b"])
            bounds = threads.even_bounds(config.num_embeddings)
            threads.run(fill_uniform, bounds, group.table_rows(config.name), group.dim, table_seed, low, high)
        elif init is not None:
            with torch.no_grad():
                init(self.weight(config.name))
        if optimizer.initial_accumulator and "sum" in group.state:
            first, last = group.state["sum"]
            group.table_rows(config.name)[:, first:last] = optimizer.initial_accumulator

    @property
    def names(self) -> list[str]:
        """The tables' names, in the order given."""
        return list(self._group_of)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows with their state."""
        return sum(group.rows.nbytes for group in self.groups)

    def weight(self, name: str) -> Tensor:
        """The weights of a table, float32 ``[rows, dim]``: a strided view of the host memory, to read or write."""
        group = self._group_of[name]
        return torch.from_numpy(group.table_rows(name))[:, : group.dim]

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """A table's optimizer state, as views: name -> float32 ``[rows, dim]``, or ``[rows]`` for one value per row."""
        group = self._group_of[name]
        table = torch.from_numpy(group.table_rows(name))
        views = {}
        for state, (first, last) in group.state.items():
            views[state] = table[:, first] if self._one_value_per_row else table[:, first:last]
        return views
