"""Moves rows to and from an accelerator: staged through pinned buffers, or straight from the host's rows."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import numpy as np
import torch

from recsys_offload.embedding.host_memory import allocate
from recsys_offload.embedding.kernels.host_move import copy_rows
from recsys_offload.embedding.runtime import Event, Runtime, Stream, WorkerStream
from recsys_offload.embedding.slots_device import DeviceSlots, TensorSlots
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.transfer import Arrival, Move, OneStreamTransfer, Transfer

# Staging buffers in each direction: one is filled or emptied while the other is copied.
BUFFERS = 2
# A buffer is made somewhat larger than the move that it is made for.
HEADROOM = 1.25


def _upload(indices: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 ``[n]`` on the device, without waiting for it: what is not pinned would be copied at once."""
    on_host = torch.from_numpy(indices.astype(np.int64))
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


class _Ring:
    """Pinned buffers that are used in turn; one is used again when the copy that read or wrote it is done."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._buffers = [np.empty(0, np.float32)] * BUFFERS
        self._copied: list[Event | None] = [None] * BUFFERS
        self._next = 0

    def take(self, rows: int, width: int) -> np.ndarray:
        """The next buffer, float32 ``[rows, width]``, once it is free."""
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        size = rows * width
        if self._buffers[self._next].size < size:
            purpose = "a staging buffer between host and device"
            larger = allocate((int(size * HEADROOM),), np.dtype(np.float32), purpose, self._pin)
            self._buffers[self._next] = larger
        return self._buffers[self._next][:size].reshape(rows, width)

    def guard(self, copied: Event) -> None:
        """Keeps the buffer taken last until ``copied``."""
        self._copied[self._next] = copied
        self._next = (self._next + 1) % BUFFERS


class _StagedArrival(Arrival):
    """Rows have arrived when the thread has given the copy to the stream, and the stream has made it."""

    def __init__(self) -> None:
        self.given: Event | None = None
        self.copied: Event | None = None

    def done(self) -> bool:
        assert self.given is not None
        return self.given.done() and self.copied is not None and self.copied.done()

    def before(self, compute: Stream) -> None:
        assert self.given is not None
        self.given.synchronize()
        assert self.copied is not None
        compute.wait(self.copied)


class StagedTransfer(Transfer):
    """Gathers rows on the host into pinned buffers, which are copied and scattered on the device; and back.

    A thread does the host's part. The two directions have a stream each, so that they share the bus.
    """

    def __init__(self, runtime: Runtime, statistics: CacheStatistics) -> None:
        """Args:
        runtime: of the device.
        statistics: where the time is noted.
        """
        super().__init__(statistics)
        pin = runtime.device.type != "cpu"
        self._device = runtime.device
        self._thread = WorkerStream("stage rows")
        self._fetching, self._returning = runtime.new_stream("fetch"), runtime.new_stream("write back")
        self._fetch_ring, self._return_ring = _Ring(pin), _Ring(pin)
        # The write-back whose values are not yet in the host's rows: the rows, where they go, and when they are here.
        self._on_its_way: tuple[np.ndarray, np.ndarray, np.ndarray, Event] | None = None

    def move(self, move: Move[TensorSlots]) -> Arrival:
        arrival = _StagedArrival()
        self._thread.run(partial(self._move, move, arrival))
        arrival.given = self._thread.record()
        return arrival

    def _move(self, move: Move[TensorSlots], arrival: _StagedArrival) -> None:
        # The rows to fetch may be among those written back before.
        self._finish_write_back()
        for update in move.after:
            self._returning.wait(update)
            self._fetching.wait(update)
        if len(move.write_back_rows):
            self._begin_write_back(move)
        if len(move.fetch_rows):
            self._fetch(move)
        arrival.copied = self._fetching.record()

    def _begin_write_back(self, move: Move[TensorSlots]) -> None:
        buffer = self._return_ring.take(len(move.write_back_rows), move.slots.width)
        records: list[torch.Tensor] = []

        def read() -> None:
            records.append(move.slots.read(_upload(move.write_back_slots, self._device)))

        def copy() -> None:
            torch.from_numpy(buffer).copy_(records.pop(), non_blocking=True)

        # A slot may still be on its way in: its batch was given up, or all rows are being flushed.
        self._returning.wait(self._fetching.record())
        self._returning.run(read)
        self._fetching.wait(self._returning.record())  # the slots are read before they are overwritten
        self._run(self._returning, "write back", copy)
        copied = self._returning.record()
        self._return_ring.guard(copied)
        self._on_its_way = (buffer, move.host, move.write_back_rows, copied)

    def _finish_write_back(self) -> None:
        if self._on_its_way is not None:
            buffer, host, rows, copied = self._on_its_way
            self._on_its_way = None
            copied.synchronize()
            copy_rows(buffer, np.arange(len(rows)), host, rows, host.shape[1])

    def _fetch(self, move: Move[TensorSlots]) -> None:
        count = len(move.fetch_rows)
        buffer = self._fetch_ring.take(count, move.slots.width)
        copy_rows(move.host, move.fetch_rows, buffer, np.arange(count), move.slots.width)

        def copy() -> None:
            records = torch.from_numpy(buffer).to(self._device, non_blocking=True)
            move.slots.write(_upload(move.fetch_slots, self._device), records)

        self._run(self._fetching, "fetch", copy)
        self._fetch_ring.guard(self._fetching.record())

    def drain(self) -> None:
        self._thread.run(self._finish_write_back)
        self._thread.synchronize()
        self._fetching.synchronize()

    def close(self) -> None:
        self._thread.run(self._finish_write_back)
        self._thread.close()
        self._fetching.close()
        self._returning.close()


class ZeroCopyTransfer(OneStreamTransfer[DeviceSlots]):
    """Kernels on the device read and write the host's rows themselves, without any work of the host per row."""

    def __init__(self, runtime: Runtime, kernels: ModuleType, statistics: CacheStatistics) -> None:
        """Args:
        runtime: of the device.
        kernels: that has ``fetch_rows`` and ``write_back_rows`` (``kernels/device.py``).
        statistics: where the time is noted.
        """
        super().__init__(runtime, statistics)
        self._device = runtime.device
        self._kernels = kernels

    def _write_back(self, move: Move[DeviceSlots]) -> None:
        rows, slots = _upload(move.write_back_rows, self._device), _upload(move.write_back_slots, self._device)
        self._kernels.write_back_rows(torch.from_numpy(move.host), rows, move.slots.rows, slots)

    def _fetch(self, move: Move[DeviceSlots]) -> None:
        rows, slots = _upload(move.fetch_rows, self._device), _upload(move.fetch_slots, self._device)
        self._kernels.fetch_rows(torch.from_numpy(move.host), rows, move.slots.rows, slots)
