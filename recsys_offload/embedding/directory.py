"""Which rows have a slot, and which give theirs up: the look-ahead planner of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recsys_offload.embedding.host_memory import allocate
from recsys_offload.embedding.kernels import host_directory as kernels
from recsys_offload.embedding.kernels import victim_queue as queue
from recsys_offload.embedding.threads import KernelThreads

# A row's past uses count half after this many times as many batches as would fill the cache. Longer is better where
# popularity does not change (generated data), shorter where it does (reviews over years); with 50 the hit rate is at
# least LFU's on both (benchmarks/README.md).
HALF_LIFE_IN_FILLS = 50
# The score of a single use in batch 0, in units of log2: room below for rows known to be rare before training begins.
FIRST_SCORE = 32
# Scores are lowered together before they reach it; the rest of int32 is room for sums.
HIGHEST_SCORE = 2**30


@dataclass(frozen=True)
class Admission:
    """What it takes to have a batch's rows in slots.

    Attributes:
        slots: int32 ``[n]``: the slot of each of the batch's rows.
        fetch: int32 ``[m]``: the positions, among the batch's rows, of those to be fetched into their slots.
        write_back_rows: int64 ``[v]``: rows that gave up a slot and may have changed since the last flush, and
        write_back_slots: int64 ``[v]``: the slots that still hold their values.
        newest_use: the last batch that used any of the slots given up; -1 where there is none.
    """

    slots: np.ndarray
    fetch: np.ndarray
    write_back_rows: np.ndarray
    write_back_slots: np.ndarray
    newest_use: int


@dataclass
class _PlannedBatch:
    """A batch that will be admitted later.

    Attributes:
        number: that it will have.
        rows: int64 ``[n]``, distinct.
        absent: int64 ``[m]``: those that had no slot when they were last looked up.
        memory: int64 ``[n]``, of ``absent``.
    """

    number: int
    rows: np.ndarray
    absent: np.ndarray
    memory: np.ndarray


class Directory:
    """The slots of one group of tables.

    Batches are admitted by one thread at a time, as a rule in the order of their numbers. A slot is held while a batch
    that uses it is unfinished. Of the others, the row to go is one that no coming batch needs, the least used first
    (uses count less the older they are; scores within 1/64 of a factor of two count as the same, and then it is the one
    that was queued first); only where all are needed, the one that is needed last.

    Memory: 4 bytes per row of the tables, 45 per slot. (The plan's own memory, ``TableGroup.last_number``, is another 4
    bytes per row.)
    """

    def __init__(self, rows: int, slots: int, threads: KernelThreads | None = None) -> None:
        """Args:
            rows: of all tables of the group.
            slots: of the cache.
            threads: that look rows up; by default the caller alone.

        Raises:
            MemoryError: the directory does not fit in host memory.
        """
        self._threads = threads or KernelThreads(1)
        self._slot_of_row = allocate((rows,), np.dtype(np.int32), f"the directory of {rows:,} rows")
        self._slot_of_row.fill(kernels.ABSENT)
        self._records = np.empty((0, queue.RECORD_COLUMNS), np.int32)
        self._row_of_slot = np.empty(0, np.int64)
        self._free = np.empty(0, np.int32)
        self._ends = np.full((queue.BUCKETS, queue.ENDS_COLUMNS), queue.NONE, np.int32)
        self._chunks = np.empty((0, queue.CHUNK_COLUMNS), np.int32)
        self._cursors = np.zeros(queue.CURSORS, np.int64)
        self._unfinished: dict[int, np.ndarray] = {}
        self._planned: dict[int, _PlannedBatch] = {}
        self._held = 0
        self._half_life: float | None = None
        self._use = FIRST_SCORE * queue.SCORE_UNIT
        self._rebased = 0
        self._flushed = -1
        self.grow(slots)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._row_of_slot)

    @property
    def residents(self) -> int:
        """How many slots hold a row."""
        return self.slots - int(self._cursors[queue.FREE])

    def held(self, oldest: int) -> int:
        """How many slots are used by batch ``oldest`` or a later one, all batches before it being finished."""
        for number in [number for number in self._unfinished if number < oldest]:
            self._held -= kernels.release_slots(
                self._unfinished.pop(number), number, self._use, self._records, self._ends, self._chunks, self._cursors
            )
        return self._held

    def grow(self, slots: int) -> None:
        """Adds slots, up to ``slots`` in total."""
        before = self.slots
        added = slots - before
        free = int(self._cursors[queue.FREE])
        records = allocate((slots, queue.RECORD_COLUMNS), np.dtype(np.int32), f"the directory of {slots:,} slots")
        records[:before] = self._records
        records[before:] = kernels.NO_USE
        records[before:, queue.QUEUED] = 0
        self._records = records
        self._row_of_slot = records.view(np.int64)[:, queue.ROW_COLUMN]
        self._row_of_slot[before:] = queue.NO_ROW
        # The lowest number is taken first.
        self._free = np.concatenate([np.arange(slots - 1, before - 1, -1, dtype=np.int32), self._free[:free]])
        self._cursors[queue.FREE] = free + added
        queued = self._queued_slots()
        self._chunks = np.empty((queue.chunk_count(slots), queue.CHUNK_COLUMNS), np.int32)
        self._refill_queue(queued)

    def _queued_slots(self) -> np.ndarray:
        slots = np.empty(self.slots, np.int32)
        return slots[: queue.queued_slots(self._ends, self._chunks, self._cursors, slots)]

    def _refill_queue(self, slots: np.ndarray) -> None:
        queue.refill(slots, self._use, self._records, self._ends, self._chunks, self._cursors)

    def admit(
        self, rows: np.ndarray, number: int, oldest: int, coming: Sequence[tuple[int, np.ndarray]] = ()
    ) -> Admission | int:
        """Gives every row of batch ``number`` a slot.

        Args:
            rows: int64 ``[n]``, distinct.
            number: of the batch; no other has it.
            oldest: the oldest unfinished batch (``number``, if there is no other): slots that it or a later one uses
                are held.
            coming: number and distinct rows of the batches that will be admitted after this one, in order, where known.

        Returns:
            The admission; or, where the slots do not suffice, how many are missing. The batch then holds those of its
            rows that have a slot, and may be tried again when older ones are finished, or the slots have grown.
        """
        if self._half_life is None and len(rows):
            self._half_life = HALF_LIFE_IN_FILLS * max(1.0, self.slots / len(rows))
        self._set_use(number)
        queue.raise_top(self._use, self._ends, self._chunks, self._cursors)
        self._planned.pop(id(rows), None)
        held = self.held(oldest)
        slots = self._unfinished.get(number)
        if slots is None:
            slots = np.full(len(rows), kernels.ABSENT, np.int32)
        bounds = self._threads.even_bounds(len(rows))
        parts = self._threads.run(
            kernels.touch_rows, bounds, rows, number, oldest, self._use, self._slot_of_row, self._records, slots
        )
        missing = sum(part >> 32 for part in parts)
        self._held = held = held + sum(part & 0xFFFFFFFF for part in parts)
        self._unfinished[number] = slots
        if missing > self.slots - held:
            return missing - (self.slots - held)
        admission = self._place(rows, slots, missing, number, oldest, coming)
        self._held += missing
        return admission

    def _place(
        self,
        rows: np.ndarray,
        slots: np.ndarray,
        missing: int,
        number: int,
        oldest: int,
        coming: Sequence[tuple[int, np.ndarray]],
    ) -> Admission:
        cursors = self._cursors
        cursors[[queue.FETCHED, queue.WRITTEN_BACK]] = 0
        cursors[queue.NEWEST_USE] = kernels.NO_USE
        fetch, write_back = np.empty(missing, np.int32), np.empty((missing, 2), np.int64)
        if missing > cursors[queue.FREE]:
            self._mark_planned(coming, oldest)
        place, needed_later = 0, np.empty(0, np.int32)
        while True:
            place = kernels.place_rows(
                place,
                rows,
                number,
                oldest,
                self._use,
                self._flushed,
                self._slot_of_row,
                self._row_of_slot,
                self._records,
                slots,
                self._free,
                needed_later,
                self._ends,
                self._chunks,
                cursors,
                fetch,
                write_back,
            )
            if place == len(rows):
                break
            needed_later = self._needed_later(number, oldest, coming)
        written_back = write_back[: cursors[queue.WRITTEN_BACK]]
        return Admission(slots, fetch, written_back[:, 0], written_back[:, 1], int(cursors[queue.NEWEST_USE]))

    def _mark_planned(self, coming: Sequence[tuple[int, np.ndarray]], oldest: int) -> None:
        """Notes which slots the coming batches need. Each is looked up once, and then only its rows without a slot."""
        planned = {}
        for number, rows in coming:
            batch = self._planned.pop(id(rows), None)
            if batch is None or batch.number != number:
                batch = _PlannedBatch(number, rows, rows, np.empty(len(rows), np.int64))
            planned[id(rows)] = batch
        for batch in self._planned.values():  # they are not coming any more: the loop was left, or began anew
            kernels.unplan_rows(
                batch.rows, oldest, self._use, self._slot_of_row, self._records, self._ends, self._chunks, self._cursors
            )
        for batch in planned.values():
            absent = kernels.mark_planned(batch.absent, batch.number, self._slot_of_row, self._records, batch.memory)
            batch.absent = batch.memory[:absent]
        self._planned = planned

    def _needed_later(self, number: int, oldest: int, coming: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        """The slots that only planned batches use, int32 ``[n]``; the last is the one that is needed last."""
        for batch in self._planned.values():
            batch.absent = batch.rows  # some of them may be about to lose their slots
        for later, rows in reversed(coming):  # so that the nearest use is what stays
            kernels.mark_first_planned(rows, later, self._slot_of_row, self._records)
        keys, slots = np.empty(self.slots, np.int64), np.empty(self.slots, np.int32)
        count = kernels.list_planned(self._records, self._row_of_slot, number, oldest, keys, slots)
        return slots[np.argsort(keys[:count], kind="stable")]

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The slots of ``rows`` (int64 ``[n]``), int32 ``[n]``; -1 for a row that has none. Changes nothing."""
        slots = np.empty(len(rows), np.int32)
        kernels.find_slots(rows, self._slot_of_row, slots)
        return slots

    def flush(self, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows, and their slots, that batches before ``oldest`` may have changed since the last flush.

        The caller writes them back: from now on they count as unchanged.
        """
        changed = (self._row_of_slot != queue.NO_ROW) & (self._records[:, queue.LAST_USE] > self._flushed)
        slots = np.flatnonzero(changed)
        self._flushed = oldest - 1
        return self._row_of_slot[slots], slots

    def forget(self) -> np.ndarray:
        """Empties every slot, without writing anything back: the host rows have been given new values.

        Returns:
            int64 ``[0]``: no row needs to be fetched before a batch does.
        """
        resident = self._row_of_slot != queue.NO_ROW
        self._slot_of_row[self._row_of_slot[resident]] = kernels.ABSENT
        self._records.fill(kernels.NO_USE)
        self._records[:, queue.QUEUED] = 0
        self._row_of_slot.fill(queue.NO_ROW)
        self._refill_queue(np.empty(0, np.int32))
        self._free = np.arange(self.slots - 1, -1, -1, dtype=np.int32)
        self._cursors[queue.FREE] = self.slots
        self._unfinished.clear()
        self._planned.clear()
        self._held = 0
        return np.empty(0, np.int64)

    def warm(self, uses_per_batch: np.ndarray) -> np.ndarray:
        """Gives the free slots to the rows that are used most, before the first batch.

        Args:
            uses_per_batch: float32 ``[R]``: how many batches in one use each row, on average; 0 for never.

        Returns:
            int64 ``[m]``: the rows placed, in slots 0 to m - 1; they are to be fetched.
        """
        self._half_life = HALF_LIFE_IN_FILLS * max(1.0, self.slots / max(1.0, float(uses_per_batch.sum())))
        # The sum of 2 ** (use / half_life) over all past uses, at a steady rate.
        steady = np.maximum(uses_per_batch, np.float32(2.0**-FIRST_SCORE)) * (self._half_life / np.log(2.0))
        scores = np.rint((FIRST_SCORE + np.log2(steady)) * queue.SCORE_UNIT).clip(0).astype(np.int32)
        used = np.flatnonzero(uses_per_batch)
        self._slot_of_row[used] = kernels.GHOST - scores[used]
        count = min(self.slots, len(used))
        chosen = np.sort(used[np.argpartition(-scores[used], count - 1)[:count]]) if count else used
        slots = np.arange(count, dtype=np.int32)
        self._slot_of_row[chosen] = slots
        self._row_of_slot[slots] = chosen
        self._records[slots, queue.SCORE] = scores[chosen]
        self._refill_queue(slots)
        self._cursors[queue.FREE] -= count
        return chosen

    def _set_use(self, number: int) -> None:
        """Sets what a single use by batch ``number`` scores."""
        if self._half_life is None:  # no batch has had rows yet: no row gets this score
            return
        self._use = round((FIRST_SCORE + number / self._half_life) * queue.SCORE_UNIT) - self._rebased
        if self._use > HIGHEST_SCORE:
            queued = self._queued_slots()
            shift = (self._use // queue.SCORE_UNIT - FIRST_SCORE) * queue.SCORE_UNIT  # whole buckets
            kernels.rebase_scores(shift, self._slot_of_row, self._records)
            self._rebased += shift
            self._use -= shift
            self._refill_queue(queued)
