"""Moves rows between the host's tables and the slots, beside the compute, in an order that keeps every value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from recsys_offload.embedding.runtime import Event, Runtime, Stream
from recsys_offload.embedding.slots import Slots
from recsys_offload.embedding.statistics import CacheStatistics

SlotsT = TypeVar("SlotsT", bound=Slots)


@dataclass(frozen=True)
class Move(Generic[SlotsT]):
    """Rows that leave slots of one group, and rows that take their place.

    Attributes:
        host: float32 ``[R, W]``: the group's tables.
        slots: of the group.
        write_back_rows: int64 ``[v]`` and
        write_back_slots: ``[v]``: changed rows, and the slots that hold their values.
        fetch_rows: int64 ``[m]`` and
        fetch_slots: ``[m]``: rows to fetch, and their slots.
        after: the updates by the batches that used these slots, as far as they may not have run yet.
    """

    host: np.ndarray
    slots: SlotsT
    write_back_rows: np.ndarray
    write_back_slots: np.ndarray
    fetch_rows: np.ndarray
    fetch_slots: np.ndarray
    after: Sequence[Event] = ()


class Arrival(ABC):
    """The moment that moved rows are in their slots."""

    @abstractmethod
    def done(self) -> bool:
        """Whether they are."""

    @abstractmethod
    def before(self, compute: Stream) -> None:
        """Lets the compute that follows wait for it; raises the error that stopped the move."""


class Transfer(ABC):
    """Carries out moves in the order they are given.

    A move first writes back, after the last update of the slots, and then fetches into the slots. A row that is on
    its way back is never fetched before it has arrived.
    """

    def __init__(self, statistics: CacheStatistics) -> None:
        """Args:
        statistics: where the time is noted.
        """
        self._statistics = statistics
        self._running: deque[tuple[str, Event, Event]] = deque()

    @abstractmethod
    def move(self, move: Move) -> Arrival:
        """Begins a move; returns at once."""

    @abstractmethod
    def drain(self) -> None:
        """Waits for all moves; raises the error that stopped one."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all moves and gives threads, streams and buffers back."""

    def _run(self, stream: Stream, name: str, work: Callable[[], None]) -> None:
        """Gives ``stream`` work whose time is noted."""
        start = stream.record()
        stream.run(work)
        self._running.append((name, start, stream.record()))
        while self._running and self._running[0][2].done():
            name, start, end = self._running.popleft()
            begun = start.time()
            self._statistics.moved(name, begun, begun + end.since(start))


class StreamArrival(Arrival):
    """The point in a stream at which rows have arrived."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def before(self, compute: Stream) -> None:
        compute.wait(self._event)


class OneStreamTransfer(Transfer, Generic[SlotsT]):
    """Moves rows in both directions in one stream, whose order is all the order that is needed."""

    def __init__(self, runtime: Runtime, statistics: CacheStatistics) -> None:
        """Args:
        runtime: whose stream does the copying.
        statistics: where the time is noted.
        """
        super().__init__(statistics)
        self._stream = runtime.new_stream("move rows")

    def move(self, move: Move[SlotsT]) -> Arrival:
        for update in move.after:
            self._stream.wait(update)
        if len(move.write_back_rows):
            self._run(self._stream, "write back", partial(self._write_back, move))
        if len(move.fetch_rows):
            self._run(self._stream, "fetch", partial(self._fetch, move))
        return StreamArrival(self._stream.record())

    @abstractmethod
    def _write_back(self, move: Move[SlotsT]) -> None:
        """Copies changed rows to the host, in the stream."""

    @abstractmethod
    def _fetch(self, move: Move[SlotsT]) -> None:
        """Copies rows from the host, in the stream."""

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.close()


class HostTransfer(OneStreamTransfer[Slots]):
    """Moves rows to and from slots in host memory: one thread copies them row by row."""

    def _write_back(self, move: Move[Slots]) -> None:
        move.slots.write_back(move.host, move.write_back_rows, move.write_back_slots)

    def _fetch(self, move: Move[Slots]) -> None:
        move.slots.fetch(move.host, move.fetch_rows, move.fetch_slots)
