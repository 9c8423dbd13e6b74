"""Which rows have a slot, and which give theirs up: the look-ahead planner of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recsys_offload.embedding.host_memory import allocate
from recsys_offload.embedding.kernels import host_directory as kernels
from recsys_offload.embedding.threads import KernelThreads

# A row's past uses count half after this many times as many batches as would fill the cache. Of 1, 3, 10, 30 and 100,
# 10 had the best or nearly the best hit rate on every data set and size tried (see memory/hit_rate.py).
HALF_LIFE_IN_FILLS = 10
# The score of a single use in batch 0, in units of log2: room below for rows known to be rare before training begins.
FIRST_SCORE = 32
# One listing looks at every slot, so it lists enough victims to make that worth while.
LISTED_SHARE = 16
# A batch that replaces more than one slot in this many begins with a fresh list.
LISTED_AGAIN_SHARE = 64
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


class Directory:
    """The slots of one group of tables.

    Batches are admitted by one thread at a time, as a rule in the order of their numbers. A slot is held while a batch
    that uses it is unfinished. Of the others, the row to go is one that no coming batch needs, the least used first
    (uses count less the older they are); only where all are needed, the one that is needed last.

    Memory: 4 bytes per row of the tables, 28 per slot. (The plan's own memory, ``TableGroup.last_number``, is another
    4 bytes per row.)
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
        self._row_of_slot = np.empty(0, np.int64)
        self._records = np.empty((0, kernels.RECORD_COLUMNS), np.int32)
        self._free = np.empty(0, np.int32)
        self._cursors = np.zeros(kernels.CURSORS, np.int64)
        self._unfinished: dict[int, np.ndarray] = {}
        self._held = 0
        self._half_life: float | None = None
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
        return self.slots - int(self._cursors[kernels.FREE])

    def held(self, oldest: int) -> int:
        """How many slots are used by batch ``oldest`` or a later one, all batches before it being finished."""
        for number in [number for number in self._unfinished if number < oldest]:
            self._held -= kernels.count_last_uses(self._unfinished.pop(number), number, self._records)
        return self._held

    def grow(self, slots: int) -> None:
        """Adds slots, up to ``slots`` in total."""
        before = self.slots
        added = slots - before
        free = int(self._cursors[kernels.FREE])
        self._row_of_slot = np.concatenate([self._row_of_slot, np.full(added, kernels.NO_ROW, np.int64)])
        fresh = np.full((added, kernels.RECORD_COLUMNS), kernels.NO_USE, np.int32)
        self._records = np.concatenate([self._records, fresh])
        # The lowest number is taken first.
        self._free = np.concatenate([np.arange(slots - 1, before - 1, -1, dtype=np.int32), self._free[:free]])
        self._cursors[kernels.FREE] = free + added
        self._victims = np.empty((max(1, slots // LISTED_SHARE), 3), np.int32)
        self._recent = np.empty((slots, 2), np.int32)
        self._cursors[kernels.VICTIM : kernels.RECENT_END + 1] = 0

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
        use = self._score_of_use(number)
        held = self.held(oldest)
        slots = np.empty(len(rows), np.int32)
        bounds = self._threads.even_bounds(len(rows))
        parts = self._threads.run(
            kernels.touch_rows, bounds, rows, number, oldest, use, self._slot_of_row, self._records, slots
        )
        missing = sum(part >> 32 for part in parts)
        self._held = held = held + sum(part & 0xFFFFFFFF for part in parts)
        self._unfinished[number] = slots
        if missing > self.slots - held:
            return missing - (self.slots - held)
        admission = self._place(rows, slots, missing, number, oldest, use, coming)
        self._held += missing
        return admission

    def _place(
        self,
        rows: np.ndarray,
        slots: np.ndarray,
        missing: int,
        number: int,
        oldest: int,
        use: int,
        coming: Sequence[tuple[int, np.ndarray]],
    ) -> Admission:
        cursors = self._cursors
        cursors[[kernels.FETCHED, kernels.WRITTEN_BACK]] = 0
        cursors[kernels.NEWEST_USE] = kernels.NO_USE
        fetch, write_back = np.empty(missing, np.int32), np.empty((missing, 2), np.int64)
        if missing > cursors[kernels.FREE]:
            for later, later_rows in reversed(coming):  # so that the nearest use is what stays
                kernels.mark_next_use(later_rows, later, self._slot_of_row, self._records)
            if missing * LISTED_AGAIN_SHARE >= self.slots:
                # What is left of an old list reaches up to rows that are used more than those released since.
                cursors[kernels.VICTIM : kernels.RECENT_END + 1] = 0
        place = 0
        while True:
            place = kernels.place_rows(
                place,
                rows,
                number,
                oldest,
                use,
                self._flushed,
                self._slot_of_row,
                self._row_of_slot,
                self._records,
                slots,
                self._free,
                self._victims,
                self._recent,
                cursors,
                fetch,
                write_back,
            )
            if place == len(rows):
                break
            self._list_victims(number, oldest, missing - int(cursors[kernels.FETCHED]))
        written_back = write_back[: cursors[kernels.WRITTEN_BACK]]
        return Admission(slots, fetch, written_back[:, 0], written_back[:, 1], int(cursors[kernels.NEWEST_USE]))

    def _list_victims(self, number: int, oldest: int, wanted: int) -> None:
        if wanted > len(self._victims):
            self._victims = np.empty((wanted, 3), np.int32)
        count = kernels.list_victims(self._records, self._row_of_slot, number, oldest, wanted, self._victims)
        # The list covers the recent rows, too, but for those that an unfinished batch holds.
        recent = self._recent[self._cursors[kernels.RECENT] : self._cursors[kernels.RECENT_END]]
        kept = recent[self._records[recent[:, 0], kernels.LAST_USE] >= oldest]
        self._recent[: len(kept)] = kept
        self._cursors[kernels.VICTIM : kernels.RECENT_END + 1] = 0, count, 0, len(kept)

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The slots of ``rows`` (int64 ``[n]``), int32 ``[n]``; -1 for a row that has none. Changes nothing."""
        slots = np.empty(len(rows), np.int32)
        kernels.find_slots(rows, self._slot_of_row, slots)
        return slots

    def flush(self, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows, and their slots, that batches before ``oldest`` may have changed since the last flush.

        The caller writes them back: from now on they count as unchanged.
        """
        changed = (self._row_of_slot != kernels.NO_ROW) & (self._records[:, kernels.LAST_USE] > self._flushed)
        slots = np.flatnonzero(changed)
        self._flushed = oldest - 1
        return self._row_of_slot[slots], slots

    def forget(self) -> np.ndarray:
        """Empties every slot, without writing anything back: the host rows have been given new values.

        Returns:
            int64 ``[0]``: no row needs to be fetched before a batch does.
        """
        resident = self._row_of_slot != kernels.NO_ROW
        self._slot_of_row[self._row_of_slot[resident]] = kernels.ABSENT
        self._row_of_slot.fill(kernels.NO_ROW)
        self._records.fill(kernels.NO_USE)
        self._free = np.arange(self.slots - 1, -1, -1, dtype=np.int32)
        self._cursors[:] = 0
        self._cursors[kernels.FREE] = self.slots
        self._unfinished.clear()
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
        scores = np.rint((FIRST_SCORE + np.log2(steady)) * kernels.SCORE_UNIT).clip(0).astype(np.int32)
        used = np.flatnonzero(uses_per_batch)
        self._slot_of_row[used] = kernels.GHOST - scores[used]
        count = min(self.slots, len(used))
        chosen = np.sort(used[np.argpartition(-scores[used], count - 1)[:count]]) if count else used
        slots = np.arange(count, dtype=np.int32)
        self._slot_of_row[chosen] = slots
        self._row_of_slot[slots] = chosen
        self._records[slots, kernels.SCORE] = scores[chosen]
        self._cursors[kernels.FREE] -= count
        return chosen

    def _score_of_use(self, number: int) -> int:
        """The score of a single use by batch ``number``."""
        if self._half_life is None:  # no batch has had rows yet: no row gets this score
            return FIRST_SCORE * kernels.SCORE_UNIT
        score = round((FIRST_SCORE + number / self._half_life) * kernels.SCORE_UNIT) - self._rebased
        if score > HIGHEST_SCORE:
            shift = score - FIRST_SCORE * kernels.SCORE_UNIT
            kernels.rebase_scores(shift, self._slot_of_row, self._records)
            self._cursors[kernels.VICTIM : kernels.RECENT_END + 1] = 0
            self._rebased += shift
            score -= shift
        return score
