"""The plan of a batch: its distinct rows, and where in the batch each occurs. Both passes share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding.config import InvalidIds
from recsys_offload.embedding.kernels import layout
from recsys_offload.embedding.kernels.host_plan import compact_tables, plan_tables, rises
from recsys_offload.embedding.store import TableGroup
from recsys_offload.embedding.threads import KernelThreads

POLICIES: dict[InvalidIds, int] = {
    "error": layout.INVALID_ERROR,
    "modulo": layout.INVALID_MODULO,
    "fallback": layout.INVALID_FALLBACK,
}


class InvalidIdError(ValueError):
    """An id that its table has no row for."""


@dataclass(frozen=True)
class GroupFeatures:
    """The features that read one group of tables, sorted by table, for one order of a batch's keys.

    Attributes:
        names: of the features.
        tables: the table that each reads.
        described: int64 ``[features, 5]``, see ``kernels/layout.py``.
        table_starts: int64 ``[tables + 1]``: where each table's features begin.
    """

    names: list[str]
    tables: list[str]
    described: np.ndarray
    table_starts: np.ndarray

    @classmethod
    def describe(
        cls,
        group: TableGroup,
        configs: Sequence[EmbeddingBagConfig | EmbeddingConfig],
        first_columns: dict[str, int],
        keys: Sequence[str],
    ) -> GroupFeatures:
        """Args:
            group: the group whose tables the features read.
            configs: of all tables.
            first_columns: table -> first column of its first feature's vector in the output.
            keys: of the batch's KeyedJaggedTensor.

        Raises:
            KeyError: a feature is not among ``keys``.
        """
        names: list[str] = []
        tables: list[str] = []
        described: list[list[int]] = []
        table_starts = [0]
        key_index = {key: index for index, key in enumerate(keys)}
        for config in configs:
            if config.name not in group.tables:
                continue
            base, size = group.tables[config.name]
            mean = isinstance(config, EmbeddingBagConfig) and config.pooling == PoolingType.MEAN
            for number, feature in enumerate(config.feature_names):
                if feature not in key_index:
                    raise KeyError(
                        f"feature {feature!r} of table {config.name!r} is not in the batch; its keys: {list(keys)}"
                    )
                column = first_columns[config.name] + number * group.dim
                described.append([key_index[feature], base, size, column, int(mean)])
                names.append(feature)
                tables.append(config.name)
            table_starts.append(len(names))
        array = np.array(described, np.int64).reshape(-1, layout.FEATURE_COLUMNS)
        return cls(names, tables, array, np.array(table_starts, np.int64))

    @property
    def any_mean(self) -> bool:
        return bool(self.described[:, layout.MEAN].any())


def _check_offsets(offsets: np.ndarray, bags: int, values: int, weights: np.ndarray) -> None:
    """Refuses offsets that would make a kernel read outside the batch."""
    if len(offsets) != bags + 1 or offsets[0] != 0 or offsets[-1] > values or not rises(offsets):
        raise ValueError(
            f"the batch's offsets are malformed: {bags} bags need {bags + 1} offsets, rising from 0 to at most {values}"
        )
    if weights.size and weights.size != values:
        raise ValueError(f"the batch has {values} ids, but {weights.size} per-id weights")


@dataclass(frozen=True)
class Ids:
    """A batch's ids as the kernels take them: contiguous arrays on the host.

    Attributes:
        keys: of the features.
        values: int64 ``[N]``.
        offsets: int64 ``[keys * batch_size + 1]``.
        weights: float32 ``[N]``, or ``[0]`` where the ids have none.
        batch_size: bags per key.
    """

    keys: list[str]
    values: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    batch_size: int

    @classmethod
    def of(cls, features: KeyedJaggedTensor, weighted: bool) -> Ids:
        """Raises:
        ValueError: the ids are not integers, or have no weights where weights are needed.
        """
        values = features.values()
        if values.is_floating_point() or values.is_complex():
            raise ValueError(f"ids must be integers, not {values.dtype}")
        weights = np.empty(0, np.float32)
        if weighted:
            if features.weights_or_none() is None:
                raise ValueError("the collection is weighted (is_weighted=True), but the batch has no weights")
            weights = features.weights().detach().cpu().float().contiguous().numpy()
        if features.variable_stride_per_key():
            raise ValueError("a batch with a different number of bags for each key is not supported")
        offsets = features.offsets().cpu().long().contiguous().numpy()
        _check_offsets(offsets, len(features.keys()) * features.stride(), len(values), weights)
        return cls(features.keys(), values.cpu().long().contiguous().numpy(), offsets, weights, features.stride())

    def key_offsets(self, key: int) -> np.ndarray:
        """The ``[batch_size + 1]`` offsets of one key's bags."""
        return self.offsets[key * self.batch_size : (key + 1) * self.batch_size + 1]

    def invalid(self, features: GroupFeatures, position: int) -> InvalidIdError:
        """The error for the id at ``position`` of ``values``."""
        key = int(np.searchsorted(self.offsets[:: max(self.batch_size, 1)], position, side="right")) - 1
        sample = int(np.searchsorted(self.key_offsets(key), position, side="right")) - 1
        index = features.described[:, layout.KEY].tolist().index(key)
        size, value = int(features.described[index, layout.SIZE]), int(self.values[position])
        return InvalidIdError(
            f"table {features.tables[index]!r}, feature {features.names[index]!r}, sample {sample}: id {value} is "
            f"outside [0, {size}). Give the table more rows (num_embeddings), mend the data, or set invalid_ids to "
            "modulo or fallback."
        )


@dataclass(frozen=True)
class Plan:
    """A batch's distinct rows in one group of tables, and where each occurs.

    The group's ids are numbered table by table, feature by feature, in batch order: N ids, n distinct rows.

    Attributes:
        rows: int64 ``[n]``: the distinct rows of the group's array, by table, as they first occur.
        inverse: int32 ``[N]``: for every id, the position of its row in ``rows``.
        starts: int32 ``[n + 1]`` and
        order: int32 ``[N]``: the compressed form: row i occurs as ids ``order[starts[i] : starts[i + 1]]``, in order.
        gradient_rows: int32 ``[N]`` and
        gradient_columns: int32 ``[N]``: for every entry of ``order``, the row of the output, and the first column in
            it, where its gradient lies.
        factors: float32 ``[N]``: for every entry of ``order``, what its gradient is multiplied by; ``[0]`` if by 1.
    """

    rows: np.ndarray
    inverse: np.ndarray
    starts: np.ndarray
    order: np.ndarray
    gradient_rows: np.ndarray
    gradient_columns: np.ndarray
    factors: np.ndarray


@dataclass(frozen=True)
class HotChunks:
    """The chunks of at most ``CHUNK`` occurrences in which the gradients of very frequent rows are summed.

    Attributes:
        hot: int64 ``[h]``: the positions, in order, of the plan's rows with more than ``CHUNK`` occurrences.
        hot_starts: int64 ``[h + 1]``: the chunks of ``hot[i]`` are ``hot_starts[i]`` to ``hot_starts[i + 1]``.
        begin: int64 ``[c]`` and
        end: int64 ``[c]``: the occurrences of each chunk, as positions in the plan's ``order``.
    """

    hot: np.ndarray
    hot_starts: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, plan: Plan) -> HotChunks:
        """The chunks of a plan."""
        occurrences = np.diff(plan.starts)
        hot = np.flatnonzero(occurrences > layout.CHUNK)
        chunks = -(-occurrences[hot] // layout.CHUNK)
        hot_starts = np.concatenate([[0], np.cumsum(chunks)])
        chunk_in_row = np.arange(hot_starts[-1]) - np.repeat(hot_starts[:-1], chunks)
        begin = np.repeat(plan.starts[hot], chunks) + chunk_in_row * layout.CHUNK
        end = np.minimum(begin + layout.CHUNK, np.repeat(plan.starts[hot + 1], chunks))
        return cls(hot, hot_starts, begin, end)


def feature_ids(features: GroupFeatures, ids: Ids) -> np.ndarray:
    """int64 ``[features + 1]``: the number of each feature's first id among the group's."""
    first_bags = features.described[:, layout.KEY] * ids.batch_size
    counts = ids.offsets[first_bags + ids.batch_size] - ids.offsets[first_bags]
    total = np.concatenate([[0], np.cumsum(counts)])
    if total[-1] >= 2**31:
        raise ValueError(f"a batch holds {total[-1]} ids, and at most {2**31 - 1} can be planned: use smaller batches")
    return total


def make_plan(
    group: TableGroup,
    features: GroupFeatures,
    ids: Ids,
    pooled: bool,
    invalid_ids: InvalidIds,
    fallback_row: int,
    threads: KernelThreads,
) -> Plan:
    """Plans a batch for one group of tables. One thread at a time may plan for a group.

    Args:
        group: the tables.
        features: that read them.
        ids: of the batch.
        pooled: whether the output has a row per sample, or one per id.
        invalid_ids: what an id outside its table means.
        fallback_row: the row for such ids, with ``invalid_ids="fallback"``.
        threads: that do the work, table by table.

    Raises:
        InvalidIdError: an id has no row, and ``invalid_ids`` is ``"error"``.
    """
    first_id = feature_ids(features, ids)
    count = int(first_id[-1])
    inverse, order = np.empty(count, np.int32), np.empty(count, np.int32)
    gradient_rows, gradient_columns = np.empty(count, np.int32), np.empty(count, np.int32)
    factors = np.empty(count if ids.weights.size or features.any_mean else 0, np.float32)
    gapped_rows, gapped_starts = np.empty(count, np.int64), np.empty(count, np.int32)
    tables = len(features.table_starts) - 1
    distinct = np.zeros(tables, np.int64)
    # Every id costs about the same; the one is for a table that the batch does not use.
    bounds = threads.cost_bounds(first_id[features.table_starts] + np.arange(tables + 1))
    failures = threads.run(
        plan_tables,
        bounds,
        features.described,
        features.table_starts,
        first_id,
        ids.values,
        ids.offsets,
        ids.weights,
        ids.batch_size,
        pooled,
        POLICIES[invalid_ids],
        fallback_row,
        group.last_number,
        gapped_rows,
        gapped_starts,
        inverse,
        order,
        gradient_rows,
        gradient_columns,
        factors,
        distinct,
    )
    raise_if_invalid(failures, features, ids)
    first_distinct = np.concatenate([[0], np.cumsum(distinct)])
    rows, starts = np.empty(first_distinct[-1], np.int64), np.empty(first_distinct[-1] + 1, np.int32)
    starts[-1] = count
    threads.run(
        compact_tables,
        bounds,
        features.table_starts,
        first_id,
        first_distinct,
        gapped_rows,
        gapped_starts,
        rows,
        starts,
        inverse,
    )
    return Plan(rows, inverse, starts, order, gradient_rows, gradient_columns, factors)


def raise_if_invalid(failures: Sequence[int], features: GroupFeatures, ids: Ids) -> None:
    """Raises for the first position among ``failures``; -1 stands for none."""
    positions = [position for position in failures if position >= 0]
    if positions:
        raise ids.invalid(features, min(positions))
