"""What the collections have in common: lookups that train the tables, and their place in a state dict."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding.build_cache import LookupSettings, build_cache
from recsys_offload.embedding.cache import DeviceCache, Ticket
from recsys_offload.embedding.compile_notice import CompileNotices
from recsys_offload.embedding.config import CacheSettings, InvalidIds, Placement, SparseOptimizerSettings
from recsys_offload.embedding.group_lookup import GroupLookup, HostLookup, SlotLookup
from recsys_offload.embedding.optimizers import CODES, InBackwardOptimizer, update_parameters
from recsys_offload.embedding.placement import check_placements
from recsys_offload.embedding.plan import GroupFeatures, Ids, Plan, make_plan
from recsys_offload.embedding.request import Part, Request
from recsys_offload.embedding.runtime import Event
from recsys_offload.embedding.slots import SlotBatch
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.store import HostTables, TableGroup
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.reused_memory import ReusedMemory

logger = logging.getLogger(__name__)

# Outputs whose memory is used again: one may still be read while another is written.
OUTPUTS_KEPT = 2


class _Lookup(torch.autograd.Function):
    """Reads the tables going forward; updates them going backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, id_weights: Tensor | None, collection: HostCollection, request: Request
    ) -> tuple[Tensor, ...]:
        ctx.collection, ctx.request = collection, request
        return tuple(collection._read(request))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        request, ctx.request = ctx.request, None  # its memory and its slots are free as soon as the rows are updated
        if request is None:
            raise RuntimeError(
                "a second backward pass through the same lookup: the first one has already updated the tables. "
                "Tables updated in the backward pass take one backward per forward."
            )
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = ctx.collection._weight_gradient(request, list(gradients))
        if request.updates:
            ctx.collection._update(request, list(gradients))
        return None, weight_gradient, None, None


class HostCollection(nn.Module):
    """What the collections have in common: the tables, their cache and optimizer, and their place in a state dict.

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
        placements: Mapping[str, Placement] | None,
        cache: CacheSettings | None,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        self._device = torch.device("cpu") if device is None else device
        if invalid_ids == "fallback":
            for config in self._configs:
                if not 0 <= fallback_row < config.num_embeddings:
                    raise ValueError(
                        f"fallback_row {fallback_row} is outside table {config.name!r} of {config.num_embeddings} rows"
                    )
        self._threads = KernelThreads(threads)
        self._optimizer_settings = optimizer
        self._pooled = pooled
        self._invalid_ids, self._fallback_row = invalid_ids, fallback_row
        cache = cache or CacheSettings()
        check_placements([config.name for config in self._configs], placements or {}, cache)
        self.tables = HostTables(
            self._configs,
            optimizer,
            seed,
            self._threads,
            self._device.type != "cpu",
            memory_limit,
            placements,
            own_caches=cache.sizes,
        )
        self.statistics = CacheStatistics()
        self._cached_groups = [index for index, group in enumerate(self.tables.groups) if group.placement != "host"]
        self.cache: DeviceCache | None = None
        if self._cached_groups:
            groups = [self.tables.groups[index] for index in self._cached_groups]
            features = [
                sum(len(config.feature_names) for config in self._configs if config.name in group.tables)
                for group in groups
            ]
            lookup = LookupSettings(self._device, optimizer, pooled)
            self.cache = build_cache(groups, features, cache, lookup, self._threads, self.statistics)
        self._lookups: list[GroupLookup] = [
            HostLookup(group, invalid_ids, fallback_row, self._threads) if group.placement == "host" else SlotLookup()
            for group in self.tables.groups
        ]
        # An input that requires a gradient, so that autograd calls the backward pass.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.optimizer = InBackwardOptimizer(optimizer, self._anchor)
        self._features: dict[tuple[str, ...], list[GroupFeatures]] = {}
        self._output_memory = ReusedMemory(np.float32, OUTPUTS_KEPT)
        self._waits: deque[tuple[Event, Event]] = deque()
        self._planning = threading.Lock()
        self._planned: dict[int, deque[Request]] = {}
        self._compile_notices = CompileNotices()

    @property
    def device(self) -> torch.device:
        """Where the output goes, and the cache is. The tables are on the host."""
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

    def _make_request(self, features: KeyedJaggedTensor, *, updates: bool) -> Request:
        """The batch's ids with the plans that are needed: of all groups to update them, else of those with slots."""
        ids = Ids.of(features, self._pooled and self.is_weighted())
        request = Request(features, ids, [Part(group_features) for group_features in self._features_for(ids.keys)])
        request.updates = updates
        with self._planning, self._compile_notices.around("plan"):
            for group, part in zip(self.tables.groups, request.parts, strict=True):
                if updates or group.placement != "host":
                    part.plan = make_plan(
                        group, part.features, ids, self._pooled, self._invalid_ids, self._fallback_row, self._threads
                    )
        return request

    def is_weighted(self) -> bool:
        """Whether batches carry per-id weights."""
        return False

    def _slot_plans(self, request: Request) -> list[Plan]:
        plans = [request.parts[index].plan for index in self._cached_groups]
        return [plan for plan in plans if plan is not None]

    def plan(self, features: KeyedJaggedTensor) -> Request:
        """Plans a batch that will be trained on, in any thread. ``admit`` comes next.

        Raises:
            InvalidIdError: an id has no row, and ``invalid_ids`` is ``error``.
            KeyError: a feature is missing.
            ValueError: the ids are no integers, or lack the weights that the collection needs.
        """
        request = self._make_request(features, updates=True)
        request.ticket = Ticket([plan.rows for plan in self._slot_plans(request)])
        return request

    def admit(self, request: Request, coming: Sequence[Request] = (), *, may_grow: bool) -> bool:
        """Sees to it that a planned batch's rows will be in slots; the forward pass of its tensor then uses them.

        Args:
            request: the planned batch.
            coming: the batches after it, as far as they are planned.
            may_grow: as for ``DeviceCache.admit``.

        Returns:
            False where it has to be tried again when a batch has finished.
        """
        assert request.ticket is not None
        if self.cache is not None:
            tickets = [other.ticket for other in coming if other.ticket is not None]
            with self._compile_notices.around("cache"):
                if not self.cache.admit(request.ticket, tickets, may_grow=may_grow):
                    return False
            for index, cache, slots in zip(self._cached_groups, self.cache.groups, request.ticket.slots, strict=True):
                part = request.parts[index]
                assert part.plan is not None
                part.slots = cache.slots
                part.batch = SlotBatch.of(request.ids, part.features, part.plan, slots)
                cache.slots.prepare(part.batch)
        with self._planning:
            self._planned.setdefault(id(request.features), deque()).append(request)
        return True

    def reads(self, features: KeyedJaggedTensor) -> bool:
        """Whether a tensor has all the keys that the tables read."""
        return {name for config in self._configs for name in config.feature_names} <= set(features.keys())

    def has_room_ahead(self, request: Request, batches_ahead: int) -> bool:
        """As ``DeviceCache.has_room_ahead``."""
        assert request.ticket is not None
        return self.cache is None or self.cache.has_room_ahead(request.ticket, batches_ahead)

    def give_up(self, request: Request) -> None:
        """Releases a planned batch that no forward pass has used."""
        assert request.ticket is not None
        with self._planning:
            waiting = self._planned.get(id(request.features), deque())
            if request in waiting:
                waiting.remove(request)
                if not waiting:
                    del self._planned[id(request.features)]
            elif request.ticket.lookup is not None:
                return  # a forward pass has it, and its backward pass will release it
        self._release(request, None)

    def _take_planned(self, features: KeyedJaggedTensor) -> Request | None:
        """The first request that was admitted for this tensor; it is then the caller's."""
        with self._planning:
            waiting = self._planned.get(id(features))
            if waiting is None:
                return None
            request = waiting.popleft()
            if not waiting:
                del self._planned[id(features)]
            return request

    def _release(self, request: Request, update: Event | None) -> None:
        assert request.ticket is not None
        request.ticket.finish(update)
        if self.cache is not None:
            self.cache.on_finish()

    def _look_up(self, features: KeyedJaggedTensor) -> tuple[Request, list[Tensor]]:
        """Reads the rows of a batch; in training, the backward pass of what it returns updates them."""
        id_weights = features.weights_or_none() if self._pooled and self.is_weighted() else None
        with torch.profiler.record_function("embedding lookup"):
            if self.training and torch.is_grad_enabled():
                request = self._take_planned(features) or self._plan_now(features)
                self._wait_for_rows(request)
                return request, list(_Lookup.apply(self._anchor, id_weights, self, request))
            request = self._make_request(features, updates=False)
            if self.cache is not None:
                copies = self.cache.assemble([plan.rows for plan in self._slot_plans(request)])
                for index, slots in zip(self._cached_groups, copies, strict=True):
                    part = request.parts[index]
                    assert part.plan is not None
                    part.slots = slots
                    rows = np.arange(slots.count, dtype=np.int32)
                    part.batch = SlotBatch.of(request.ids, part.features, part.plan, rows)
            if id_weights is not None and id_weights.requires_grad and torch.is_grad_enabled():
                return request, list(_Lookup.apply(self._anchor, id_weights, self, request))
            return request, self._read(request)

    def _plan_now(self, features: KeyedJaggedTensor) -> Request:
        """A batch that was not planned ahead: its rows are fetched while training waits."""
        request = self.plan(features)
        self.admit(request, may_grow=True)
        taken = self._take_planned(features)
        assert taken is not None
        return taken

    def _wait_for_rows(self, request: Request) -> None:
        assert request.ticket is not None
        if self.cache is None or request.ticket.arrival is None:
            return
        compute = self.cache.runtime.compute
        start = compute.record()
        request.ticket.arrival.before(compute)
        self._waits.append((start, compute.record()))
        self._note_waits()

    def _note_waits(self) -> None:
        """Counts the waits that are over; on a device it is the stream that waits, not this thread."""
        while self._waits and self._waits[0][1].done():
            start, end = self._waits.popleft()
            begun, seconds = start.time(), end.since(start)
            self.statistics.add(stalled_seconds=seconds)
            self.statistics.span("training", "wait for rows", begun, begun + seconds)

    def _read(self, request: Request) -> list[Tensor]:
        with self._computing("lookup"):
            outputs = self._read_parts(request)
            if request.ticket is not None and self.cache is not None:
                request.ticket.lookup = self.cache.runtime.compute.record()
        return outputs

    def _compute(self, group: TableGroup, work: Callable[[], None]) -> None:
        """Gives the compute stream work over a group's slots; over the host's rows it is done at once."""
        if group.placement == "host" or self.cache is None:
            work()
        else:
            self.cache.runtime.compute.run(work)

    def _new_output(self, rows: int, columns: int, *, on_host: bool) -> Tensor:
        """An uninitialised float32 ``[rows, columns]``."""
        if on_host or self._device.type == "cpu":
            return torch.from_numpy(self._output_memory.take(rows, columns))
        return torch.empty(rows, columns, device=self._device)

    def _read_parts(self, request: Request) -> list[Tensor]:
        raise NotImplementedError

    def _group_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """For each group, the gradient of the output that its features wrote to."""
        raise NotImplementedError

    @contextmanager
    def _computing(self, what: str) -> Iterator[None]:
        """Around work over the slots."""
        start = time.perf_counter()
        with self.cache.compute_lock if self.cache is not None else nullcontext(), self._compile_notices.around(what):
            yield
        self.statistics.span("training", what, start, time.perf_counter())

    def _weight_gradient(self, request: Request, gradients: list[Tensor]) -> Tensor:
        """The gradient of the per-id weights, float32 ``[N]``, before the rows are updated."""
        result = np.zeros(len(request.ids.values), np.float32)
        with self._computing("gradient of the weights"):
            for lookup, part, gradient in zip(
                self._lookups, request.parts, self._group_gradients(gradients), strict=True
            ):
                lookup.weight_gradients(request, part, gradient, result)
        return torch.from_numpy(result)

    def _update(self, request: Request, gradients: list[Tensor]) -> None:
        """Updates every row that the batch used."""
        self.tables.step += 1
        settings = self._optimizer_settings
        parameters = update_parameters(settings, self.optimizer.learning_rate, self.tables.step)
        with torch.profiler.record_function("embedding update"), self._computing("update"):
            for group, lookup, part, gradient in zip(
                self.tables.groups, self._lookups, request.parts, self._group_gradients(gradients), strict=True
            ):
                update = partial(lookup.update, part, gradient, CODES[settings.name], parameters)
                self._compute(group, update)
        self._release(request, None if self.cache is None else self.cache.runtime.compute.record())

    def flush(self) -> None:
        """Writes every changed row back to the host, so that ``tables`` has the newest values. The cache stays filled.

        Reading or saving the tables through the module (``state_dict``, checkpoints) does it by itself.
        """
        if self.cache is not None:
            self.cache.flush()
        self._note_waits()

    def warm(self, uses: Mapping[str, np.ndarray]) -> None:
        """Fills the cache with the rows that are used most, before training begins.

        Args:
            uses: table -> float32 ``[rows]``: how many batches in one use each row, as ``count_uses`` gives it.
        """
        if self.cache is not None:
            self.cache.warm(
                [np.concatenate([uses[name] for name in cache.group.tables]) for cache in self.cache.groups]
            )

    def reload(self) -> None:
        """Call it after ``tables`` has been given new values: the cache then takes them from there.

        Raises:
            RuntimeError: batches are on their way through the cache.
        """
        if self.cache is not None:
            self.cache.reload()

    def _state_key(self, prefix: str, table: str) -> str:
        return f"{prefix}{self.table_prefix}.{table}.weight"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.flush()
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
        self.flush()
        known = {self._state_key(prefix, name): self.tables.weight(name) for name in self.tables.names}
        for key, weight in known.items():
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
            elif given.shape != weight.shape:
                error_msgs.append(f"size mismatch for {key}: {tuple(given.shape)} given, {tuple(weight.shape)} here")
            else:
                weight.copy_(given)
        self.reload()
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)
