"""Slots in tensors on a device: rows that kernels on the device look up and update."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from recsys_offload.embedding.gradient import with_contiguous_rows
from recsys_offload.embedding.plan import HotChunks
from recsys_offload.embedding.slots import SlotBatch, Slots


@dataclass(frozen=True)
class _Packed:
    """The arrays of a batch behind one another in one int32 tensor, which is copied to the device at once.

    Attributes:
        block: int32; pinned, where the device is not the host.
        parts: name -> (first element, number of elements, dtype).
    """

    block: Tensor
    parts: dict[str, tuple[int, int, torch.dtype]]

    @classmethod
    def of(cls, batch: SlotBatch, pin: bool) -> _Packed:
        """Packs what the kernels need, as ``kernels/device.py`` names it."""
        plan, chunks = batch.plan, HotChunks.of(batch.plan)
        first_partial = np.full(len(batch.slots), -1, np.int32)
        first_partial[chunks.hot] = chunks.hot_starts[:-1]
        arrays = {
            "slots": batch.slots,
            "slot_of_id": batch.slot_of_id,
            "offsets": batch.offsets.astype(np.int32),
            "weights": batch.weights,
            "columns": batch.columns.astype(np.int32),
            "means": batch.means.astype(np.int32),
            "starts": plan.starts,
            "gradient_rows": plan.gradient_rows,
            "gradient_columns": plan.gradient_columns,
            "factors": plan.factors,
            "first_partial": first_partial,
            "chunk_begin": chunks.begin.astype(np.int32),
            "chunk_end": chunks.end.astype(np.int32),
        }
        block = torch.empty(sum(len(array) for array in arrays.values()), dtype=torch.int32, pin_memory=pin)
        parts, first, target = {}, 0, block.numpy()
        for name, array in arrays.items():
            dtype = torch.float32 if array.dtype == np.float32 else torch.int32
            target[first : first + len(array)] = array.view(np.int32)
            parts[name] = (first, len(array), dtype)
            first += len(array)
        return cls(block, parts)


class _OnDevice:
    """A packed batch on the device, its arrays by name."""

    def __init__(self, packed: _Packed, device: torch.device) -> None:
        self._block = packed.block.to(device, non_blocking=True)
        self._parts = packed.parts

    def __getitem__(self, name: str) -> Tensor:
        first, count, dtype = self._parts[name]
        return self._block[first : first + count].view(dtype)


class TensorSlots(Slots):
    """Slots whose rows are read and written by tensor operations."""

    device: torch.device

    @abstractmethod
    def read(self, slots: Tensor) -> Tensor:
        """The rows of ``slots`` (int64 ``[n]``, on the device), with their state: float32 ``[n, W]``."""

    @abstractmethod
    def write(self, slots: Tensor, records: Tensor) -> None:
        """Sets the rows of ``slots``; the arguments are those of ``read``, and what it gives."""

    def fetch(self, host: np.ndarray, host_rows: np.ndarray, slots: np.ndarray) -> None:
        self.write(self._indices(slots), torch.from_numpy(host[host_rows]).to(self.device))

    def write_back(self, host: np.ndarray, host_rows: np.ndarray, slots: np.ndarray) -> None:
        host[host_rows] = self.read(self._indices(slots)).cpu().numpy()

    def _indices(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def _gather(self, host: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> Tensor:
        """The newest weights of some rows, float32 ``[n, dim]``; the arguments are those of ``assemble``."""
        weights = torch.empty(len(rows), self.dim, device=self.device)
        cached, others = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        weights[self._indices(cached)] = self.read(self._indices(slots[cached]))[:, : self.dim]
        weights[self._indices(others)] = torch.from_numpy(host[rows[others], : self.dim]).to(self.device)
        return weights


class DeviceSlots(TensorSlots):
    """Slots computed over by kernels of our own: Triton's, or plain torch where that is missing."""

    def __init__(self, rows: Tensor, dim: int, kernels: ModuleType) -> None:
        """Args:
        rows: float32 ``[S, W]``, on the device.
        dim: weights per row.
        kernels: ``kernels/device.py`` or ``kernels/device_torch.py``.
        """
        self.rows = rows
        self.dim, self.width = dim, rows.shape[1]
        self.device = rows.device
        self._kernels = kernels

    @property
    def count(self) -> int:
        return len(self.rows)

    def grow(self, count: int) -> None:
        rows = torch.zeros(count, self.width, device=self.device)
        rows[: self.count] = self.rows
        self.rows = rows

    def read(self, slots: Tensor) -> Tensor:
        return self.rows[slots]

    def write(self, slots: Tensor, records: Tensor) -> None:
        self.rows[slots] = records

    def assemble(self, host: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> DeviceSlots:
        return DeviceSlots(self._gather(host, rows, slots), self.dim, self._kernels)

    def prepare(self, batch: SlotBatch) -> None:
        batch.packed = _Packed.of(batch, pin=self.device.type != "cpu")

    def _on_device(self, batch: SlotBatch) -> _OnDevice:
        """The batch's arrays; copied to the device when they are first needed there, and kept for the update."""
        if batch.packed is None:
            self.prepare(batch)
        if isinstance(batch.packed, _Packed):
            batch.packed = _OnDevice(batch.packed, self.device)
        return batch.packed

    def lookup_pooled(self, batch: SlotBatch, output: Tensor) -> None:
        arrays = self._on_device(batch)
        self._kernels.lookup_pooled(
            self.rows,
            self.dim,
            arrays["slot_of_id"],
            arrays["offsets"],
            arrays["weights"],
            arrays["columns"],
            arrays["means"].bool(),
            output,
        )

    def lookup_rows(self, batch: SlotBatch, output: Tensor) -> None:
        self._kernels.lookup_rows(self.rows, self.dim, self._on_device(batch)["slot_of_id"], output)

    def update(self, batch: SlotBatch, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        arrays = self._on_device(batch)
        self._kernels.update(
            self.rows,
            self.dim,
            optimizer,
            parameters,
            arrays["slots"],
            arrays["starts"],
            with_contiguous_rows(gradient),
            arrays["gradient_rows"],
            arrays["gradient_columns"],
            arrays["factors"],
            arrays["first_partial"],
            arrays["chunk_begin"],
            arrays["chunk_end"],
        )

    def weight_gradients(self, batch: SlotBatch, gradient: Tensor) -> Tensor:
        arrays = self._on_device(batch)
        output = torch.empty(len(batch.slot_of_id), device=self.device)
        self._kernels.weight_gradients(
            self.rows,
            self.dim,
            arrays["slot_of_id"],
            arrays["offsets"],
            arrays["columns"],
            arrays["means"].bool(),
            with_contiguous_rows(gradient),
            output,
        )
        return output.cpu()
