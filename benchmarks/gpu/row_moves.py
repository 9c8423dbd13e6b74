"""Random rows to the device and back, in isolation: zero copy, staging, and what the host's gather takes of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType

import numpy as np
import torch

from benchmarks.gpu.bus import BOTH, TO_DEVICE, TO_HOST
from recsys_offload.embedding.host_memory import allocate, is_registered
from recsys_offload.embedding.kernels.host_move import copy_rows
from recsys_offload.embedding.runtime import Runtime
from recsys_offload.embedding.slots_device import DeviceSlots
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.transfer import Move, Transfer
from recsys_offload.embedding.transfer_device import StagedTransfer, ZeroCopyTransfer

STAGING, ZERO_COPY, GATHER = "staging", "zero_copy", "host gather alone"
MOST_MOVES = 50
# Sets of random rows, used in turn, so that none is left in the processor's caches.
ROW_SETS = 8

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class RowMoves:
    """The speed of one way to move rows.

    Attributes:
        way: ``staging``, ``zero_copy`` or the host's gather alone.
        direction: as the bus names them.
        row_bytes: of a row.
        rows: per move.
        bytes_per_second: of rows, in both directions together where they move in both.
        share_of_pinned_copies: that divided by what large pinned copies reach in the same direction.
    """

    way: str
    direction: str
    row_bytes: int
    rows: int
    bytes_per_second: float
    share_of_pinned_copies: float


class RowMover:
    """Moves rows of one table, whose memory is taken for rows of any width."""

    def __init__(self, runtime: Runtime, table_bytes: int, moved_bytes: int, bus: dict[str, float]) -> None:
        """Args:
        runtime: of the device.
        table_bytes: of the table.
        moved_bytes: at most, for one figure.
        bus: bytes per second of pinned copies, by direction.
        """
        on_gpu = runtime.device.type != "cpu"
        self._runtime = runtime
        self._memory = allocate((table_bytes // 4,), np.dtype(np.float32), "the table that rows are moved from", on_gpu)
        self._memory.fill(1.0)
        self.zero_copy_is_possible = is_registered(self._memory) or not on_gpu
        self._moved_bytes = moved_bytes
        self._bus = bus
        self._random = np.random.default_rng(0)

    def measure(self, row_bytes: int, rows: int) -> list[RowMoves]:
        """All ways and directions, for rows of one width, so many in a move."""
        width = row_bytes // 4
        table = self._memory[: len(self._memory) // width * width].reshape(-1, width)
        row_sets = [
            self._random.choice(len(table), rows, replace=False, shuffle=True).astype(np.int64) for _ in range(ROW_SETS)
        ]
        kernels = import_module("recsys_offload.embedding.kernels.device")
        slots = DeviceSlots(torch.zeros(2 * rows, width, device=self._runtime.device), width, kernels)
        ways = [STAGING, ZERO_COPY] if self.zero_copy_is_possible else [STAGING]
        results = []
        for way in ways:
            transfer = self._transfer(way, kernels)
            try:
                for direction in (TO_DEVICE, TO_HOST, BOTH):
                    moves = _moves(table, slots, row_sets, direction)
                    speed = self._speed(row_bytes * rows * (2 if direction == BOTH else 1), transfer, moves)
                    results.append(self._result(way, direction, row_bytes, rows, speed))
            finally:
                transfer.close()
        results.append(self._result(GATHER, TO_DEVICE, row_bytes, rows, self._gather_speed(table, row_sets)))
        return results

    def _result(self, way: str, direction: str, row_bytes: int, rows: int, speed: float) -> RowMoves:
        return RowMoves(way, direction, row_bytes, rows, speed, speed / self._bus[direction])

    def _transfer(self, way: str, kernels: ModuleType) -> Transfer:
        if way == STAGING:
            return StagedTransfer(self._runtime, CacheStatistics())
        return ZeroCopyTransfer(self._runtime, kernels, CacheStatistics())

    def _repeats(self, move_bytes: int) -> int:
        return max(2, min(MOST_MOVES, self._moved_bytes // move_bytes))

    def _speed(self, move_bytes: int, transfer: Transfer, moves: list[Move[DeviceSlots]]) -> float:
        def move_all(count: int) -> None:
            for number in range(count):
                transfer.move(moves[number % len(moves)])
            transfer.drain()

        return self._timed(move_bytes, move_all)

    def _gather_speed(self, table: np.ndarray, row_sets: list[np.ndarray]) -> float:
        """Of the loop that fills a staging buffer."""
        buffer = np.ones((len(row_sets[0]), table.shape[1]), np.float32)
        places = np.arange(len(buffer))

        def gather(count: int) -> None:
            for number in range(count):
                copy_rows(table, row_sets[number % len(row_sets)], buffer, places, table.shape[1])

        return self._timed(buffer.nbytes, gather)

    def _timed(self, bytes_each: int, work: Callable[[int], None]) -> float:
        """Bytes per second of ``work``, which does something that often; once before, to compile and to make room."""
        work(2)
        self._runtime.synchronize()
        repeats = self._repeats(bytes_each)
        start = time.perf_counter()
        work(repeats)
        self._runtime.synchronize()
        return repeats * bytes_each / (time.perf_counter() - start)


def _moves(
    table: np.ndarray, slots: DeviceSlots, row_sets: list[np.ndarray], direction: str
) -> list[Move[DeviceSlots]]:
    """A move for each set of rows; in both directions, one set is fetched and the next one written back."""
    rows = len(row_sets[0])
    places, other_places = np.arange(rows), np.arange(rows, 2 * rows)
    make = partial(Move[DeviceSlots], table, slots)
    if direction == TO_DEVICE:
        return [make(_NOTHING, _NOTHING, fetched, places) for fetched in row_sets]
    if direction == TO_HOST:
        return [make(returned, places, _NOTHING, _NOTHING) for returned in row_sets]
    following = row_sets[1:] + row_sets[:1]
    return [
        make(returned, other_places, fetched, places) for fetched, returned in zip(row_sets, following, strict=True)
    ]
