"""Lookup and update of one group of tables, on the host's rows or in slots."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from recsys_offload.embedding.config import InvalidIds
from recsys_offload.embedding.gradient import RowMajor
from recsys_offload.embedding.kernels import layout
from recsys_offload.embedding.kernels.host_lookup import lookup_pooled, lookup_rows, weight_gradients
from recsys_offload.embedding.plan import POLICIES, feature_ids, raise_if_invalid
from recsys_offload.embedding.request import Part, Request
from recsys_offload.embedding.store import TableGroup
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.update import update


class GroupLookup(ABC):
    """How one group's rows are read and changed."""

    @abstractmethod
    def pooled(self, request: Request, part: Part, output: Tensor) -> None:
        """Pools the bags of the group's features into their columns of ``output``, float32 ``[B, D]``."""

    @abstractmethod
    def rows(self, request: Request, part: Part, output: Tensor) -> None:
        """Copies the weights of every id into ``output``, float32 ``[ids, dim]``."""

    @abstractmethod
    def weight_gradients(self, request: Request, part: Part, gradient: Tensor, output: np.ndarray) -> None:
        """Adds to ``output`` float32 ``[N]`` the gradients of the per-id weights, before the rows are updated."""

    @abstractmethod
    def update(self, part: Part, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        """Updates every row of the part's plan."""


class HostLookup(GroupLookup):
    """Over the host's rows themselves."""

    def __init__(self, group: TableGroup, invalid_ids: InvalidIds, fallback_row: int, threads: KernelThreads) -> None:
        self._group = group
        self._policy = POLICIES[invalid_ids]
        self._fallback_row = fallback_row
        self._threads = threads

    def pooled(self, request: Request, part: Part, output: Tensor) -> None:
        ids = request.ids
        failures = self._threads.run(
            lookup_pooled,
            self._threads.even_bounds(ids.batch_size),
            self._group.rows,
            self._group.dim,
            part.features.described,
            ids.values,
            ids.offsets,
            ids.weights,
            ids.batch_size,
            self._policy,
            self._fallback_row,
            output.numpy(),
        )
        raise_if_invalid(failures, part.features, ids)

    def rows(self, request: Request, part: Part, output: Tensor) -> None:
        ids = request.ids
        failures = self._threads.run(
            lookup_rows,
            self._threads.even_bounds(ids.batch_size),
            self._group.rows,
            self._group.dim,
            part.features.described,
            feature_ids(part.features, ids),
            ids.values,
            ids.offsets,
            ids.batch_size,
            self._policy,
            self._fallback_row,
            output.numpy(),
        )
        raise_if_invalid(failures, part.features, ids)

    def weight_gradients(self, request: Request, part: Part, gradient: Tensor, output: np.ndarray) -> None:
        ids, matrix = request.ids, RowMajor.of(gradient)
        self._threads.run(
            weight_gradients,
            self._threads.even_bounds(ids.batch_size),
            self._group.rows,
            self._group.dim,
            part.features.described,
            ids.values,
            ids.offsets,
            ids.batch_size,
            self._policy,
            self._fallback_row,
            matrix.flat,
            matrix.row_stride,
            output,
        )

    def update(self, part: Part, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        assert part.plan is not None
        rows, matrix = self._group.rows, RowMajor.of(gradient)
        update(rows, self._group.dim, part.plan.rows, part.plan, matrix, optimizer, parameters, self._threads)


class SlotLookup(GroupLookup):
    """Over the slots that the part names."""

    def pooled(self, request: Request, part: Part, output: Tensor) -> None:
        assert part.slots is not None and part.batch is not None
        part.slots.lookup_pooled(part.batch, output)

    def rows(self, request: Request, part: Part, output: Tensor) -> None:
        assert part.slots is not None and part.batch is not None
        part.slots.lookup_rows(part.batch, output)

    def weight_gradients(self, request: Request, part: Part, gradient: Tensor, output: np.ndarray) -> None:
        assert part.slots is not None and part.batch is not None
        gradients = part.slots.weight_gradients(part.batch, gradient).numpy()
        ids, first_id = request.ids, feature_ids(part.features, request.ids)
        for index, key in enumerate(part.features.described[:, layout.KEY]):
            begin, end = ids.key_offsets(key)[[0, -1]]
            output[begin:end] += gradients[first_id[index] : first_id[index + 1]]

    def update(self, part: Part, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        assert part.slots is not None and part.batch is not None
        part.slots.update(part.batch, gradient, optimizer, parameters)
