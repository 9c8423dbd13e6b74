"""What the collections have in common: lookups that train the tables, and their place in a state dict."""

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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding.config import InvalidIds, SparseOptimizerSettings
from recsys_offload.embedding.gradient import RowMajor
from recsys_offload.embedding.kernels.host_lookup import weight_gradients
from recsys_offload.embedding.optimizers import CODES, InBackwardOptimizer, update_parameters
from recsys_offload.embedding.plan import (
    POLICIES,
    GroupFeatures,
    Ids,
    Plan,
    make_plan,
)
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.update import update
from recsys_offload.reused_memory import ReusedMemory

logger = logging.getLogger(__name__)

SECONDS_BEFORE_COMPILE_NOTICE = 1.0
# Outputs whose memory is used again: one may still be read while another is written.
OUTPUTS_KEPT = 2


@contextmanager
def _compile_notice(what: str) -> Iterator[None]:
    """Says why the first batch takes long, where it does: Numba compiles once per machine and keeps the result."""
    message = f"Compiling the embedding {what} for this machine (once; later runs take it from the cache) ..."
    timer = threading.Timer(SECONDS_BEFORE_COMPILE_NOTICE, logger.warning, [message])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Request:
    """One batch at one collection: its ids, and for each group its features and, in training, its plan."""

    def __init__(self, ids: Ids, features: list[GroupFeatures], plans: list[Plan]) -> None:
        self.ids = ids
        self.features = features
        self.plans = plans


class _Lookup(torch.autograd.Function):
    """Reads the tables going forward; updates them going backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, id_weights: Tensor | None, collection: HostCollection, request: Request
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
        arrays = [RowMajor.of(gradient) for gradient in gradients]
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = ctx.collection._weight_gradient(ctx.request, arrays)
        if ctx.request.plans:
            ctx.collection._update(ctx.request, arrays)
        return None, weight_gradient, None, None


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
        pooled: bool,
        invalid_ids: InvalidIds,
        fallback_row: int,
        seed: int,
        threads: int | None,
        memory_limit: int | None,
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
        self._pooled = pooled
        self._invalid_ids, self._fallback_row = invalid_ids, fallback_row
        self.tables = HostTables(
            self._configs, optimizer, seed, self._threads, self._device.type == "cuda", memory_limit
        )
        # An input that requires a gradient, so that autograd calls the backward pass.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.optimizer = InBackwardOptimizer(optimizer, self._anchor)
        self._features: dict[tuple[str, ...], list[GroupFeatures]] = {}
        self._output_memory = ReusedMemory(np.float32, OUTPUTS_KEPT)
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
            cached = [GroupFeatures.describe(group, self._configs, first_columns, keys) for group in self.tables.groups]
            self._features[tuple(keys)] = cached
        return cached

    def _look_up(self, features: KeyedJaggedTensor, weighted: bool) -> tuple[Request, list[Tensor]]:
        """Reads the rows of a batch; in training, the backward pass of what it returns updates them."""
        ids = Ids.of(features, weighted)
        group_features = self._features_for(ids.keys)
        id_weights = features.weights() if weighted else None
        request = Request(ids, group_features, [])
        with torch.profiler.record_function("host embedding lookup"):
            if self._compiled_forward:
                return request, self._look_up_planned(request, id_weights)
            with _compile_notice("lookup"):
                outputs = self._look_up_planned(request, id_weights)
            self._compiled_forward = True
            return request, outputs

    def _look_up_planned(self, request: Request, id_weights: Tensor | None) -> list[Tensor]:
        updates = self.training and torch.is_grad_enabled()
        if updates:
            request.plans = [
                make_plan(
                    group,
                    features,
                    request.ids,
                    self._pooled,
                    self._invalid_ids,
                    self._fallback_row,
                    self._threads,
                )
                for group, features in zip(self.tables.groups, request.features, strict=True)
            ]
        if updates or (id_weights is not None and id_weights.requires_grad and torch.is_grad_enabled()):
            return list(_Lookup.apply(self._anchor, id_weights, self, request))
        return self._read(request)

    def _read(self, request: Request) -> list[Tensor]:
        raise NotImplementedError

    def _group_gradients(self, gradients: list[RowMajor]) -> list[RowMajor]:
        """For each group, the gradient of the output that its features wrote to."""
        raise NotImplementedError

    def _weight_gradient(self, request: Request, gradients: list[RowMajor]) -> Tensor:
        """The gradient of the per-id weights, float32 ``[N]``, before the rows are updated."""
        ids = request.ids
        result = np.zeros(len(ids.values), np.float32)
        bounds = self._threads.even_bounds(ids.batch_size)
        for group, features, gradient in zip(
            self.tables.groups, request.features, self._group_gradients(gradients), strict=True
        ):
            self._threads.run(
                weight_gradients,
                bounds,
                group.rows,
                group.dim,
                features.described,
                ids.values,
                ids.offsets,
                ids.batch_size,
                POLICIES[self._invalid_ids],
                self._fallback_row,
                gradient.flat,
                gradient.row_stride,
                result,
            )
        return torch.from_numpy(result)

    def _update(self, request: Request, gradients: list[RowMajor]) -> None:
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
                    with _compile_notice("update"):
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
