"""The device's cache of hot rows: slots for every group of tables, filled ahead of the batches that use them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from recsys_offload.embedding.directory import Admission, Directory
from recsys_offload.embedding.resident import ResidentDirectory
from recsys_offload.embedding.runtime import Event, Runtime
from recsys_offload.embedding.slots import Slots
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.store import TableGroup
from recsys_offload.embedding.transfer import Arrival, Move, Transfer

logger = logging.getLogger(__name__)

# A batch's rows are moved while the one before it is trained on, if both fit into this share of the slots; rows of
# batches further ahead only while they take little of the room that the rows of past batches are kept in.
NEXT_BATCH_SHARE = 1 / 2
FURTHER_BATCHES_SHARE = 1 / 32
# What a cache that is too small grows by, at least, so that it does not grow often.
GROWTH = 1.25


def most_batches_ahead(depth: int) -> int:
    """How many batches may have slots beside the one in training, where ``depth`` batches are known ahead."""
    return max(1, depth // 2)


def fits_ahead(unfinished: int, held: int, rows: int, slots: int) -> bool:
    """Whether a batch of ``rows`` may take slots while ``unfinished`` others, at least one, hold ``held`` of them."""
    return held + rows <= (NEXT_BATCH_SHARE if unfinished == 1 else FURTHER_BATCHES_SHARE) * slots


def do_nothing() -> None:
    """The listener where nobody listens."""


class CacheTooSmallError(MemoryError):
    """A batch needs more rows than the cache may have slots."""


@dataclass
class GroupCache:
    """The cache of one group of tables.

    Attributes:
        group: the tables.
        slots: on the device.
        directory: which slot holds which row.
        limit: the most slots there may be.
    """

    group: TableGroup
    slots: Slots
    directory: Directory | ResidentDirectory
    limit: int

    def describe(self) -> str:
        names = list(self.group.tables)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"the cache of {'table' if len(names) == 1 else f'{len(names)} tables'} {shown} (dim {self.group.dim})"


@dataclass
class Ticket:
    """One batch's claim on its slots: they are held from its admission until it is finished.

    Attributes:
        rows: for each group, int64 ``[n]``: the batch's distinct rows.
        number: of the batch; -1 before it is admitted.
        slots: for each group admitted so far, int32 ``[n]``.
        arrival: when the rows are in their slots.
        admitted: whether every group has given it slots.
        lookup: the point at which its rows have been looked up.
    """

    rows: list[np.ndarray]
    number: int = -1
    slots: list[np.ndarray] = field(default_factory=list)
    arrival: Arrival | None = None
    admitted: bool = False
    lookup: Event | None = None
    _finish: Callable[[int, Event | None], None] | None = None

    def finish(self, update: Event | None) -> None:
        """Releases the slots. Any thread may call it at any moment, the garbage collector's included.

        Args:
            update: the point at which the batch's update is done; None where it was not trained on.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish(self.number, update or self.lookup)

    def __del__(self) -> None:
        self.finish(None)  # a batch that was given up: its lookup has gone without a backward pass


class DeviceCache:
    """The caches of all groups of a collection that have slots on the device.

    Batches are admitted one after the other, each under a number; any thread may do it. ``lock`` guards everything
    but the slots' values; ``compute_lock`` is held by whoever gives the compute stream work over the slots, and by
    whoever replaces them.
    """

    def __init__(
        self,
        groups: Sequence[GroupCache],
        runtime: Runtime,
        transfer: Transfer,
        statistics: CacheStatistics,
    ) -> None:
        self.groups = list(groups)
        self.runtime = runtime
        self.statistics = statistics
        self.lock = threading.RLock()
        self.compute_lock = threading.RLock()
        self._transfer = transfer
        self._next = 0
        self._unfinished: deque[int] = deque()
        self._updates: dict[int, Event] = {}
        self._reads: list[Event] = []
        # Filled by any thread at any moment, the garbage collector's included: no lock can be taken there.
        self._finished: SimpleQueue[tuple[int, Event | None]] = SimpleQueue()
        self.on_finish: Callable[[], None] = do_nothing
        self._warned = False

    def _finish(self, number: int, event: Event | None) -> None:
        self._finished.put((number, event))

    def _collect_finished(self) -> int:
        """Takes note of what has finished; returns the number of the oldest unfinished batch, or of the next one."""
        while True:
            try:
                number, update = self._finished.get_nowait()
            except Empty:
                break
            self._unfinished.remove(number)
            if update is not None:
                self._updates[number] = update
        oldest = self._unfinished[0] if self._unfinished else self._next
        for number in [number for number, update in self._updates.items() if number < oldest and update.done()]:
            del self._updates[number]
        return oldest

    @property
    def unfinished(self) -> int:
        """How many batches hold slots."""
        with self.lock:
            self._collect_finished()
            return len(self._unfinished)

    @property
    def slot_count(self) -> int:
        """Slots of all groups together."""
        return sum(cache.directory.slots for cache in self.groups)

    def slots_held(self) -> int:
        """How many slots unfinished batches hold."""
        with self.lock:
            oldest = self._collect_finished()
            return sum(cache.directory.held(oldest) for cache in self.groups)

    def has_room_ahead(self, ticket: Ticket, batches_ahead: int) -> bool:
        """Whether a batch may be admitted before the ones that hold slots are finished, without crowding them out.

        Args:
            ticket: of the batch.
            batches_ahead: the most batches that may be admitted beside the one that is being trained on.
        """
        with self.lock:
            oldest = self._collect_finished()
            unfinished = sum(number != ticket.number for number in self._unfinished)
            if unfinished == 0:
                return True
            if unfinished > batches_ahead:
                return False
            return all(
                isinstance(cache.directory, ResidentDirectory)
                or fits_ahead(unfinished, cache.directory.held(oldest), len(rows), cache.directory.slots)
                for cache, rows in zip(self.groups, ticket.rows, strict=True)
            )

    def admit(self, ticket: Ticket, coming: Sequence[Ticket] = (), *, may_grow: bool) -> bool:
        """Gives a batch's rows slots and begins to move them there.

        Args:
            ticket: of the batch; ``arrival`` and ``slots`` are set when it is admitted.
            coming: the batches after it, as far as they are known.
            may_grow: whether to add slots where too few are free, because nothing else will free any.

        Returns:
            False where too few slots are free and ``may_grow`` is off: try again when a batch has finished.

        Raises:
            CacheTooSmallError: the slots would have to grow beyond their limit.
        """
        with self.lock:
            start = time.perf_counter()
            if ticket.number < 0:
                ticket.number, ticket._finish = self._next, self._finish
                self._unfinished.append(self._next)
                self._next += 1
            oldest = self._collect_finished()
            for index in range(len(ticket.slots), len(self.groups)):
                cache, rows = self.groups[index], ticket.rows[index]
                later = [(self._next + ahead, other.rows[index]) for ahead, other in enumerate(coming)]
                admission = cache.directory.admit(rows, ticket.number, oldest, later)
                if isinstance(admission, int):
                    if not may_grow:
                        return False
                    self._grow(cache, cache.directory.slots + admission, len(rows))
                    admission = cache.directory.admit(rows, ticket.number, oldest, later)
                    assert isinstance(admission, Admission)
                ticket.slots.append(admission.slots)
                ticket.arrival = self._move(cache, rows, admission)
            ticket.admitted = True
            self.statistics.add(batches=1)
            self.statistics.span("move ahead", f"admit batch {ticket.number}", start, time.perf_counter())
            return True

    def _move(self, cache: GroupCache, rows: np.ndarray, admission: Admission) -> Arrival:
        row_bytes = cache.group.row_bytes
        fetched, written_back = len(admission.fetch), len(admission.write_back_rows)
        if isinstance(cache.directory, Directory):  # in a resident table every row would count as a hit
            self.statistics.add(
                rows=len(rows),
                hits=len(rows) - fetched,
                fetched=fetched,
                fetched_bytes=fetched * row_bytes,
                written_back=written_back,
                written_back_bytes=written_back * row_bytes,
            )
        return self._transfer.move(
            Move(
                cache.group.rows,
                cache.slots,
                admission.write_back_rows,
                admission.write_back_slots,
                rows[admission.fetch],
                admission.slots[admission.fetch],
                [update for number, update in self._updates.items() if number <= admission.newest_use] + self._reads,
            )
        )

    def _grow(self, cache: GroupCache, needed: int, rows: int) -> None:
        before = cache.directory.slots
        others = len(self._unfinished) - 1
        unfinished = f"{rows:,} rows" + (f", beside those that {others} unfinished batches hold" if others else "")
        if needed > cache.limit:
            raise CacheTooSmallError(
                f"{cache.describe()} needs {needed:,} slots for a batch of {unfinished}, but may have only "
                f"{cache.limit:,}: raise embedding.cache.limit, or use smaller batches"
            )
        slots = min(max(needed, int(before * GROWTH)), cache.limit)
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s had %s slots and grows to %s: it needs %s for a batch of %s. Set embedding.cache.size to at least "
                "that, or use smaller batches.",
                cache.describe(),
                f"{before:,}",
                f"{slots:,}",
                f"{needed:,}",
                unfinished,
            )
        self._transfer.drain()
        with self.compute_lock:
            self.runtime.synchronize()
            cache.slots.grow(slots)
        cache.directory.grow(slots)
        self.statistics.add(grown=1)

    def flush(self) -> None:
        """Writes every changed row back to the host; the rows stay in their slots."""
        with self.lock:
            oldest = self._collect_finished()
            newest = self.runtime.compute.record()
            for cache in self.groups:
                rows, slots = cache.directory.flush(oldest)
                nothing = np.empty(0, np.int64)
                self._transfer.move(Move(cache.group.rows, cache.slots, rows, slots, nothing, nothing, [newest]))
                self.statistics.add(written_back=len(rows), written_back_bytes=len(rows) * cache.group.row_bytes)
            self._transfer.drain()

    def assemble(self, rows: Sequence[np.ndarray]) -> list[Slots]:
        """The newest weights of each group's ``rows`` (int64 ``[n]``), read without a change to what is cached."""
        with self.lock, self.compute_lock:
            self._transfer.drain()
            copies = [
                cache.slots.assemble(cache.group.rows, part, cache.directory.find(part))
                for cache, part in zip(self.groups, rows, strict=True)
            ]
            self._reads = [event for event in self._reads if not event.done()]
            self._reads.append(self.runtime.compute.record())
        return copies

    def reload(self) -> None:
        """Takes note that the host's rows have been given new values: what the slots hold is void.

        Raises:
            RuntimeError: batches hold slots, whose rows would change under them.
        """
        with self.lock:
            self._collect_finished()
            if self._unfinished:
                raise RuntimeError(
                    f"tables cannot be loaded while {len(self._unfinished)} batches are on their way through the "
                    "cache: end the loop over prefetch(...) first"
                )
            self._transfer.drain()
            for cache in self.groups:
                self._fill(cache, cache.directory.forget())

    def warm(self, uses: Sequence[np.ndarray]) -> None:
        """Fills the slots with the rows that are used most.

        Args:
            uses: for each group, float32 ``[R]``: how many batches in one use each row.
        """
        with self.lock:
            for cache, group_uses in zip(self.groups, uses, strict=True):
                if isinstance(cache.directory, Directory):
                    cache.directory.forget()
                    self._fill(cache, cache.directory.warm(group_uses))

    def _fill(self, cache: GroupCache, rows: np.ndarray) -> None:
        """Fetches rows (int64 ``[m]``) that the directory has put into slots 0 to m - 1."""
        nothing = np.empty(0, np.int64)
        slots = np.arange(len(rows), dtype=np.int32)
        self._transfer.move(Move(cache.group.rows, cache.slots, nothing, nothing, rows, slots)).before(
            self.runtime.compute
        )

    def close(self) -> None:
        """Ends the transfer's threads. The slots' changes must have been flushed."""
        self._transfer.close()
