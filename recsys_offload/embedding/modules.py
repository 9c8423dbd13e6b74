"""Collections of embedding tables in host memory, with the interface of TorchRec's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys_offload.embedding.config import InvalidIds, SparseOptimizerSettings
from recsys_offload.embedding.kernels.host_lookup import lookup_pooled, lookup_rows, weight_gradients
from recsys_offload.embedding.optimizers import CODES, InBackwardOptimizer, update_parameters
from recsys_offload.embedding.plan import (
    POLICIES,
    GroupFeatures,
    Ids,
    Plan,
    feature_ids,
    make_plan,
    raise_if_invalid,
)
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.update import update

logger = logging.getLogger(__name__)

SECONDS_BEFORE_COMPILE_NOTICE = 1.0


@contextmanager
def _compile_notice() -> Iterator[None]:
    """Says why the first batch takes long, where it does: Numba compiles once per machine and keeps the result."""
    message = "Compiling the embedding kernels for this machine (once; later runs take them from the cache) ..."
    timer = threading.Timer(SECONDS_BEFORE_COMPILE_NOTICE, logger.warning, [message])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Lookup(torch.autograd.Function):
    """Reads the tables going forward; updates them going backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, id_weights: Tensor | None, collection: HostCollection, request: _Request
    ) -> tuple[Tensor, ...]:
        ctx.collection, ctx.request, ctx.used = collection, request, False
        return tuple(collection._read(request))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        if ctx.used:
            raise RuntimeError(
                "a second backward pass through the same lookup: the first one has already updated the tables. "
                "Tables updated in the backward pass take one backward per forward."
            )
        ctx.used = True
        arrays = [gradient.float().contiguous().numpy() for gradient in gradients]
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = ctx.collection._weight_gradient(ctx.request, arrays)
        if ctx.request.plans:
            ctx.collection._apply(ctx.request, arrays)
        return None, weight_gradient, None, None


class _Request:
    """One batch at one collection: its ids, and for each group its features and, in training, its plan."""

    def __init__(self, ids: Ids, features: list[GroupFeatures], plans: list[Plan]) -> None:
        self.ids = ids
        self.features = features
        self.plans = plans


class HostCollection(nn.Module):
    """What the collections have in common: the tables, their optimizer, and their place in a state dict.

    The tables are no parameters of the module: they are updated in the backward pass, by the optimizer given here,
    while the module is in training mode and gradients are enabled. ``state_dict`` holds them nevertheless.
    """

    table_prefix = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
        *,
        optimizer: SparseOptimizerSettings,
        output_columns: int,
        invalid_ids: InvalidIds,
        fallback_row: int,
        seed: int,
        threads: int | None,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        for config in self._configs:
            if not config.feature_names:
                config.feature_names = [config.name]
            if invalid_ids == "fallback" and fallback_row >= config.num_embeddings:
                raise ValueError(
                    f"fallback_row {fallback_row} is outside table {config.name!r} of {config.num_embeddings} rows"
                )
        self._device = torch.device("cpu") if device is None else device
        self._threads = KernelThreads(threads)
        self._optimizer_settings = optimizer
        self._output_columns = output_columns
        self._invalid_ids, self._fallback_row = invalid_ids, fallback_row
        self.tables = HostTables(self._configs, optimizer, seed, self._threads, pin=self._device.type == "cuda")
        # An input that requires a gradient, so that autograd calls the backward pass.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.optimizer = InBackwardOptimizer(optimizer, self._anchor)
        self._features: dict[tuple[str, ...], list[GroupFeatures]] = {}
        self._compiled_forward = self._compiled_backward = False

    @property
    def device(self) -> torch.device:
        """Where the output goes. The tables are on the host."""
        return self._device

    def _first_columns(self) -> dict[str, int]:
        """Table -> first column of its first feature's vector in the pooled output."""
        columns, first = {}, 0
        for config in self._configs:
            columns[config.name] = first
            first += config.embedding_dim * len(config.feature_names)
        return columns

    def _features_for(self, keys: Sequence[str]) -> list[GroupFeatures]:
        """How each group's features are read from a batch with these keys."""
        cached = self._features.get(tuple(keys))
        if cached is None:
            first_columns = self._first_columns()
            cached = [
                GroupFeatures.describe(group, self._configs, first_columns, keys) for group in self.tables.groups
            ]
            self._features[tuple(keys)] = cached
        return cached

    def _look_up(self, features: KeyedJaggedTensor, weighted: bool) -> tuple[_Request, list[Tensor]]:
        """Reads the rows of a batch; in training, the backward pass of what it returns updates them."""
        ids = Ids.of(features, weighted)
        group_features = self._features_for(ids.keys)
        id_weights = features.weights() if weighted else None
        request = _Request(ids, group_features, [])
        with torch.profiler.record_function("host embedding lookup"):
            if self._compiled_forward:
                return request, self._look_up_planned(request, id_weights)
            with _compile_notice():
                outputs = self._look_up_planned(request, id_weights)
            self._compiled_forward = True
            return request, outputs

    def _look_up_planned(self, request: _Request, id_weights: Tensor | None) -> list[Tensor]:
        updates = self.training and torch.is_grad_enabled()
        if updates:
            request.plans = [
                make_plan(
                    group, features, request.ids, self._output_columns, self._invalid_ids, self._fallback_row,
                    self._threads,
                )  # fmt: skip
                for group, features in zip(self.tables.groups, request.features, strict=True)
            ]
        if updates or (id_weights is not None and id_weights.requires_grad and torch.is_grad_enabled()):
            return list(_Lookup.apply(self._anchor, id_weights, self, request))
        return self._read(request)

    def _read(self, request: _Request) -> list[Tensor]:
        raise NotImplementedError

    def _group_gradients(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        """For each group, the gradient of the output that its features wrote to."""
        raise NotImplementedError

    def _weight_gradient(self, request: _Request, gradients: list[np.ndarray]) -> Tensor:
        """The gradient of the per-id weights, float32 ``[N]``, before the rows are updated."""
        ids = request.ids
        result = np.zeros(len(ids.values), np.float32)
        bounds = self._threads.even_bounds(ids.batch_size)
        for group, features, gradient in zip(
            self.tables.groups, request.features, self._group_gradients(gradients), strict=True
        ):
            self._threads.run(
                weight_gradients, bounds, group.rows, group.dim, features.described, ids.values, ids.offsets,
                ids.batch_size, POLICIES[self._invalid_ids], self._fallback_row, gradient, result,
            )  # fmt: skip
        return torch.from_numpy(result)

    def _apply(self, request: _Request, gradients: list[np.ndarray]) -> None:
        """Updates every row that the batch used."""
        self.tables.step += 1
        settings = self._optimizer_settings
        parameters = update_parameters(settings, self.optimizer.learning_rate, self.tables.step)
        with torch.profiler.record_function("host embedding update"):
            for group, plan, gradient in zip(
                self.tables.groups, request.plans, self._group_gradients(gradients), strict=True
            ):
                if self._compiled_backward:
                    update(group, plan, gradient, CODES[settings.name], parameters, self._threads)
                else:
                    with _compile_notice():
                        update(group, plan, gradient, CODES[settings.name], parameters, self._threads)
        self._compiled_backward = True

    def _state_key(self, prefix: str, table: str) -> str:
        return f"{prefix}{self.table_prefix}.{table}.weight"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.tables.names:
            destination[self._state_key(prefix, name)] = self.tables.weight(name)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = {self._state_key(prefix, name): self.tables.weight(name) for name in self.tables.names}
        for key, weight in known.items():
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
            elif given.shape != weight.shape:
                error_msgs.append(f"size mismatch for {key}: {tuple(given.shape)} given, {tuple(weight.shape)} here")
            else:
                weight.copy_(given)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)


class HostEmbeddingBagCollection(HostCollection):
    """TorchRec's ``EmbeddingBagCollection`` over tables in host memory.

    Takes a ``KeyedJaggedTensor`` on the host and returns a ``KeyedTensor`` float32 ``[B, D]`` on ``device``, D being
    the sum over features of their table's dim. Bags are summed or averaged in the order of their ids; an empty bag
    gives zeros. With per-id weights a mean is the weighted sum divided by the number of ids.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        *,
        optimizer: SparseOptimizerSettings,
        invalid_ids: InvalidIds = "error",
        fallback_row: int = 0,
        seed: int = 0,
        threads: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Args:
            tables: TorchRec's description of each table.
            is_weighted: whether the batches carry per-id weights.
            optimizer: that updates the rows of a batch during its backward pass.
            invalid_ids: what an id outside its table means: ``error``, ``modulo`` or ``fallback``.
            fallback_row: the row for such ids, with ``fallback``.
            seed: of the initial values.
            threads: that work on the tables; by default one per core that this process may use.
            device: where the output goes; by default the host.

        Raises:
            ValueError: a table's description is wrong.
            MemoryError: the tables do not fit in host memory.
        """
        self._names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._lengths = [config.embedding_dim for config in tables for _ in config.feature_names or [config.name]]
        super().__init__(
            tables, optimizer=optimizer, output_columns=sum(self._lengths), invalid_ids=invalid_ids,
            fallback_row=fallback_row, seed=seed, threads=threads, device=device,
        )  # fmt: skip
        self._is_weighted = is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools each bag of ``features``.

        Raises:
            InvalidIdError: an id has no row, and ``invalid_ids`` is ``error``.
            KeyError: a feature is missing.
            ValueError: the ids are no integers, or lack the weights that the collection needs.
        """
        _, (output,) = self._look_up(features, self._is_weighted)
        return KeyedTensor(self._names, self._lengths, output.to(self._device))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def _read(self, request: _Request) -> list[Tensor]:
        ids = request.ids
        output = torch.empty(ids.batch_size, self._output_columns)
        bounds = self._threads.even_bounds(ids.batch_size)
        for group, features in zip(self.tables.groups, request.features, strict=True):
            failures = self._threads.run(
                lookup_pooled, bounds, group.rows, group.dim, features.described, ids.values, ids.offsets, ids.weights,
                ids.batch_size, POLICIES[self._invalid_ids], self._fallback_row, output.numpy(),
            )  # fmt: skip
            raise_if_invalid(failures, features, ids)
        return [output]

    def _group_gradients(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        return gradients * len(self.tables.groups)


class HostEmbeddingCollection(HostCollection):
    """TorchRec's ``EmbeddingCollection`` over tables in host memory.

    Takes a ``KeyedJaggedTensor`` on the host and returns, for each feature, a ``JaggedTensor`` on ``device`` whose
    values are the rows of its ids, float32 ``[ids, dim]``.
    """

    table_prefix = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        *,
        optimizer: SparseOptimizerSettings,
        invalid_ids: InvalidIds = "error",
        fallback_row: int = 0,
        seed: int = 0,
        threads: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """The arguments and errors are those of ``HostEmbeddingBagCollection``."""
        super().__init__(
            tables, optimizer=optimizer, output_columns=0, invalid_ids=invalid_ids, fallback_row=fallback_row,
            seed=seed, threads=threads, device=device,
        )  # fmt: skip
        self._names_by_table = dict(zip(self.tables.names, get_embedding_names_by_table(tables), strict=True))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the row of every id; raises as ``HostEmbeddingBagCollection.forward``."""
        request, outputs = self._look_up(features, weighted=False)
        result: dict[str, JaggedTensor] = {}
        for group_features, output in zip(request.features, outputs, strict=True):
            first_id = feature_ids(group_features, request.ids).tolist()
            names = [name for table in dict.fromkeys(group_features.tables) for name in self._names_by_table[table]]
            vectors = output.to(self._device)
            for index, (name, feature) in enumerate(zip(names, group_features.names, strict=True)):
                jagged = features[feature]
                result[name] = JaggedTensor(
                    vectors[first_id[index] : first_id[index + 1]], lengths=jagged.lengths().to(self._device)
                )
        return result

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def _read(self, request: _Request) -> list[Tensor]:
        ids = request.ids
        bounds = self._threads.even_bounds(ids.batch_size)
        outputs = []
        for group, features in zip(self.tables.groups, request.features, strict=True):
            first_id = feature_ids(features, ids)
            output = torch.empty(int(first_id[-1]), group.dim)
            failures = self._threads.run(
                lookup_rows, bounds, group.rows, group.dim, features.described, first_id, ids.values, ids.offsets,
                ids.batch_size, POLICIES[self._invalid_ids], self._fallback_row, output.numpy(),
            )  # fmt: skip
            raise_if_invalid(failures, features, ids)
            outputs.append(output)
        return outputs

    def _group_gradients(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        return gradients


def host_collections(model: nn.Module) -> dict[str, HostCollection]:
    """The collections over host tables inside a model: module path -> collection."""
    return {path: module for path, module in model.named_modules() if isinstance(module, HostCollection)}
