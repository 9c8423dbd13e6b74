"""The slots of a cache: rows with their optimizer state on the device, and what is computed over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_offload.embedding.gradient import RowMajor
from recsys_offload.embedding.host_memory import allocate
from recsys_offload.embedding.kernels import layout
from recsys_offload.embedding.kernels.host_lookup import lookup_pooled, lookup_rows, weight_gradients
from recsys_offload.embedding.kernels.host_move import copy_rows
from recsys_offload.embedding.plan import GroupFeatures, Ids, Plan, feature_ids
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.update import update


@dataclass
class SlotBatch:
    """A batch's ids as slots, numbered feature by feature: N ids, F features, B samples.

    Attributes:
        plan: the distinct rows and where they occur.
        slots: int32 ``[n]``: the slot of each of the plan's rows.
        slot_of_id: int32 ``[N]``.
        offsets: int64 ``[F * B + 1]``: where each bag's ids begin.
        weights: float32 ``[N]``, or ``[0]`` where the ids have none.
        columns: int64 ``[F]``: the first column of each feature's pooled vector in the output.
        means: bool ``[F]``: whether a feature's bags are averaged.
        batch_size: B.
        packed: what ``Slots.prepare`` made of it.
    """

    plan: Plan
    slots: np.ndarray
    slot_of_id: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    columns: np.ndarray
    means: np.ndarray
    batch_size: int
    packed: Any = None

    @classmethod
    def of(cls, ids: Ids, features: GroupFeatures, plan: Plan, slots: np.ndarray) -> SlotBatch:
        """The batch that ``plan`` was made for, with the slots of the plan's rows."""
        keys, size = features.described[:, layout.KEY], ids.batch_size
        first_id = feature_ids(features, ids)
        bags = ids.offsets[keys[:, None] * size + np.arange(size)]
        offsets = np.append(bags + (first_id[:-1] - ids.offsets[keys * size])[:, None], first_id[-1])
        weights = ids.weights
        if weights.size:
            ends = ids.offsets[(keys + 1) * size]
            parts = [weights[begin:end] for begin, end in zip(ids.offsets[keys * size], ends, strict=True)]
            weights = np.concatenate([*parts, weights[:0]])
        columns, means = features.described[:, layout.COLUMN], features.described[:, layout.MEAN].astype(bool)
        return cls(plan, slots, slots[plan.inverse], offsets, weights, columns, means, size)


class Slots(ABC):
    """``count`` rows of ``width`` float32 values: ``dim`` weights, then the optimizer's state.

    What computes is to be called within the compute stream.
    """

    dim: int
    width: int

    @property
    @abstractmethod
    def count(self) -> int:
        """How many slots there are."""

    @abstractmethod
    def grow(self, count: int) -> None:
        """Adds slots, up to ``count`` in total. Nothing may use the slots meanwhile.

        Raises:
            MemoryError: there is not enough memory.
        """

    def prepare(self, batch: SlotBatch) -> None:  # noqa: B027 - most kinds need nothing
        """Makes ready, ahead of time and in any thread, what the batch's lookup and update will need."""

    @abstractmethod
    def fetch(self, host: np.ndarray, host_rows: np.ndarray, slots: np.ndarray) -> None:
        """Copies rows of ``host`` float32 ``[R, W]`` into slots."""

    @abstractmethod
    def write_back(self, host: np.ndarray, host_rows: np.ndarray, slots: np.ndarray) -> None:
        """Copies slots into rows of ``host`` float32 ``[R, W]``."""

    @abstractmethod
    def assemble(self, host: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> Slots:
        """A copy of the newest weights of some rows, to look up without changing what the slots hold.

        Args:
            host: float32 ``[R, W]``: the host's tables.
            rows: int64 ``[n]``: of them.
            slots: int32 ``[n]``: their slots; -1 for a row that has none, whose newest values the host has.

        Returns:
            Slots 0 to n - 1, without optimizer state.
        """

    @abstractmethod
    def lookup_pooled(self, batch: SlotBatch, output: Tensor) -> None:
        """Pools the bags of every feature into its columns of ``output``, float32 ``[B, D]``."""

    @abstractmethod
    def lookup_rows(self, batch: SlotBatch, output: Tensor) -> None:
        """Copies the weights of every id into ``output``, float32 ``[N, dim]``."""

    @abstractmethod
    def update(self, batch: SlotBatch, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        """Sums the gradients of every row and applies the optimizer to it.

        Args:
            batch: whose rows to update.
            gradient: of the lookup's output.
            optimizer: one of the codes of ``kernels/layout.py``.
            parameters: float32, see ``kernels/layout.py``.
        """

    @abstractmethod
    def weight_gradients(self, batch: SlotBatch, gradient: Tensor) -> Tensor:
        """The gradient of the per-id weights, float32 ``[N]`` on the host."""


class HostSlots(Slots):
    """Slots in host memory, computed over by the host kernels."""

    def __init__(self, dim: int, width: int, count: int, threads: KernelThreads) -> None:
        """Raises:
        MemoryError: there is not enough host memory.
        """
        self.dim, self.width = dim, width
        self._threads = threads
        self.rows = self._allocate(count)

    @classmethod
    def over(cls, rows: np.ndarray, dim: int, threads: KernelThreads) -> HostSlots:
        """Slots whose rows are given, float32 ``[S, W]``."""
        slots = cls.__new__(cls)
        slots.dim, slots.width, slots.rows, slots._threads = dim, rows.shape[1], rows, threads
        return slots

    def _allocate(self, count: int) -> np.ndarray:
        purpose = f"a cache of {count:,} rows of {self.dim} weights and their state"
        return allocate((count, self.width), np.dtype(np.float32), purpose)

    @property
    def count(self) -> int:
        return len(self.rows)

    def grow(self, count: int) -> None:
        rows = self._allocate(count)
        rows[: len(self.rows)] = self.rows
        self.rows = rows

    def fetch(self, host: np.ndarray, host_rows: np.ndarray, slots: np.ndarray) -> None:
        copy_rows(host, host_rows, self.rows, slots, self.width)

    def write_back(self, host: np.ndarray, host_rows: np.ndarray, slots: np.ndarray) -> None:
        copy_rows(self.rows, slots, host, host_rows, self.width)

    def assemble(self, host: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> HostSlots:
        records = np.empty((len(rows), self.dim), np.float32)
        cached = np.flatnonzero(slots >= 0)
        copy_rows(self.rows, slots[cached], records, cached, self.dim)
        others = np.flatnonzero(slots < 0)
        copy_rows(host, rows[others], records, others, self.dim)
        return HostSlots.over(records, self.dim, self._threads)

    def _described(self, batch: SlotBatch) -> np.ndarray:
        described = np.zeros((len(batch.columns), layout.FEATURE_COLUMNS), np.int64)
        described[:, layout.KEY] = np.arange(len(described))
        described[:, layout.SIZE] = self.count
        described[:, layout.COLUMN] = batch.columns
        described[:, layout.MEAN] = batch.means
        return described

    def lookup_pooled(self, batch: SlotBatch, output: Tensor) -> None:
        self._threads.run(
            lookup_pooled,
            self._threads.even_bounds(batch.batch_size),
            self.rows,
            self.dim,
            self._described(batch),
            batch.slot_of_id,
            batch.offsets,
            batch.weights,
            batch.batch_size,
            layout.INVALID_ERROR,
            0,
            output.numpy(),
        )

    def lookup_rows(self, batch: SlotBatch, output: Tensor) -> None:
        self._threads.run(
            lookup_rows,
            self._threads.even_bounds(batch.batch_size),
            self.rows,
            self.dim,
            self._described(batch),
            batch.offsets[:: max(1, batch.batch_size)],
            batch.slot_of_id,
            batch.offsets,
            batch.batch_size,
            layout.INVALID_ERROR,
            0,
            output.numpy(),
        )

    def update(self, batch: SlotBatch, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        matrix = RowMajor.of(gradient)
        update(self.rows, self.dim, batch.slots, batch.plan, matrix, optimizer, parameters, self._threads)

    def weight_gradients(self, batch: SlotBatch, gradient: Tensor) -> Tensor:
        matrix = RowMajor.of(gradient)
        result = np.zeros(len(batch.slot_of_id), np.float32)
        self._threads.run(
            weight_gradients,
            self._threads.even_bounds(batch.batch_size),
            self.rows,
            self.dim,
            self._described(batch),
            batch.slot_of_id,
            batch.offsets,
            batch.batch_size,
            layout.INVALID_ERROR,
            0,
            matrix.flat,
            matrix.row_stride,
            result,
        )
        return torch.from_numpy(result)
