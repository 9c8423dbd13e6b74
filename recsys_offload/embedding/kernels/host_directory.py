"""Numba kernels of the directory: which slot holds a row, and which rows give up theirs.

``records`` holds what is known of each slot, and ``row_of_slot`` int64 ``[S]`` its row, or ``NO_ROW`` (see
``victim_queue.py``). ``slot_of_row`` is int32 ``[R]``: a slot; or ``ABSENT`` for a row that was never here; or, for one
that was, ``GHOST - score``: its score is kept where its slot was, so that it costs no memory.

A score says how much a row was used, recent uses counting more: log2 of the sum over its uses of ``2 ** (use /
half_life)``, in units of ``1 / SCORE_UNIT``. It needs no aging, because the weight of a use relative to another never
changes (forward decay: Cormode, Shkapenyuk, Srivastava and Xu, 2009; frequency and recency in one number as in LRFU:
Lee et al., 2001).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.numba_support import inlined, kernel, prefetch, prefetch_write
from recsys_offload.embedding.kernels.victim_queue import (
    FETCHED,
    FIRST_PLANNED,
    FREE,
    LAST_PLANNED,
    LAST_USE,
    NEWEST_USE,
    NO_ROW,
    QUEUED,
    RECORD_COLUMNS,
    SCORE,
    SCORE_UNIT,
    WRITTEN_BACK,
    next_victim,
    queue_slot,
)

# Before any batch.
NO_USE = -1
ABSENT, GHOST = -1, -2

ROWS_AHEAD = 48
SLOTS_AHEAD = 24

_TABLE_STEPS = 16  # per unit of log2
_SUM_TABLE = np.rint(SCORE_UNIT * np.log2(1 + 2.0 ** -(np.arange(20 * _TABLE_STEPS) / _TABLE_STEPS))).astype(np.int32)


@inlined
def _add_use(score: int, use: int) -> int:
    """The score after one more use, whose own score is ``use``: log2 of the sum of two powers, from a table."""
    larger = max(score, use)
    index = (larger - min(score, use)) // (SCORE_UNIT // _TABLE_STEPS)
    return larger + _SUM_TABLE[index] if index < _SUM_TABLE.shape[0] else larger


@kernel
def touch_rows(
    first: int,
    last: int,
    rows: Any,
    number: int,
    oldest: int,
    use: int,
    slot_of_row: Any,
    records: Any,
    slots: Any,
) -> int:
    """Finds rows ``[first, last)`` of batch ``number`` and marks those that have a slot as used by it.

    ``slots[i]`` becomes the row's slot, or the negative entry of ``slot_of_row``; one that is not negative is from an
    earlier try, and its use has been counted. Returns ``missing * 2**32 + held``: how many rows have no slot, and how
    many slots no unfinished batch held before.
    """
    missing, held = 0, 0
    for index in range(first, last):
        if index + ROWS_AHEAD < last:
            prefetch(slot_of_row, rows[index + ROWS_AHEAD])
        if index + SLOTS_AHEAD < last:
            ahead = slot_of_row[rows[index + SLOTS_AHEAD]]
            if ahead >= 0:
                prefetch_write(records, np.int64(ahead) * RECORD_COLUMNS)
        if slots[index] >= 0:
            continue
        slot = slot_of_row[rows[index]]
        slots[index] = slot
        if slot < 0:
            missing += 1
        else:
            held += records[slot, LAST_USE] < oldest
            records[slot, LAST_USE] = max(records[slot, LAST_USE], number)
            records[slot, SCORE] = _add_use(records[slot, SCORE], use)
    return missing * 2**32 + held


@kernel
def release_slots(slots: Any, number: int, use: int, records: Any, ends: Any, chunks: Any, cursors: Any) -> int:
    """Batch ``number`` is finished: queues those of ``slots`` that no later batch uses; negative ones stand for none.

    Returns how many there are.
    """
    count = 0
    for index in range(slots.shape[0]):
        if index + SLOTS_AHEAD < slots.shape[0] and slots[index + SLOTS_AHEAD] >= 0:
            prefetch_write(records, np.int64(slots[index + SLOTS_AHEAD]) * RECORD_COLUMNS)
        slot = slots[index]
        if slot >= 0 and records[slot, LAST_USE] == number:
            count += 1
            if records[slot, QUEUED] == 0:
                queue_slot(slot, use, records, ends, chunks, cursors)
    return count


@kernel
def unplan_rows(
    rows: Any, oldest: int, use: int, slot_of_row: Any, records: Any, ends: Any, chunks: Any, cursors: Any
) -> None:
    """The batch that was planned to use ``rows`` will not come: queues their slots, unless batches hold them."""
    for index in range(rows.shape[0]):
        slot = slot_of_row[rows[index]]
        if slot >= 0:
            records[slot, LAST_PLANNED] = NO_USE
            if records[slot, QUEUED] == 0 and records[slot, LAST_USE] < oldest:
                queue_slot(slot, use, records, ends, chunks, cursors)


@kernel
def mark_planned(rows: Any, number: int, slot_of_row: Any, records: Any, absent: Any) -> int:
    """Notes that batch ``number`` will use those of ``rows`` that have a slot; the others go to ``absent``.

    ``absent`` int64 ``[n]`` may be ``rows`` itself. Returns how many there are.
    """
    count = 0
    for index in range(rows.shape[0]):
        if index + ROWS_AHEAD < rows.shape[0]:
            prefetch(slot_of_row, rows[index + ROWS_AHEAD])
        if index + SLOTS_AHEAD < rows.shape[0]:
            ahead = slot_of_row[rows[index + SLOTS_AHEAD]]
            if ahead >= 0:
                prefetch_write(records, np.int64(ahead) * RECORD_COLUMNS)
        slot = slot_of_row[rows[index]]
        if slot >= 0:
            records[slot, LAST_PLANNED] = max(records[slot, LAST_PLANNED], number)
        else:
            absent[count] = rows[index]
            count += 1
    return count


@kernel
def mark_first_planned(rows: Any, number: int, slot_of_row: Any, records: Any) -> None:
    """As ``mark_planned``, for the first batch that will use each: call it for the last batch first."""
    for index in range(rows.shape[0]):
        slot = slot_of_row[rows[index]]
        if slot >= 0:
            records[slot, FIRST_PLANNED] = number


@kernel
def list_planned(records: Any, row_of_slot: Any, number: int, oldest: int, keys: Any, slots: Any) -> int:
    """Lists the slots that only batches after ``number`` use, with the first of them as key; returns how many."""
    count = 0
    for slot in range(records.shape[0]):
        if records[slot, LAST_USE] < oldest and records[slot, LAST_PLANNED] > number and row_of_slot[slot] != NO_ROW:
            keys[count] = records[slot, FIRST_PLANNED]
            slots[count] = slot
            count += 1
    return count


@kernel
def place_rows(
    begin: int,
    rows: Any,
    number: int,
    oldest: int,
    use: int,
    flushed: int,
    slot_of_row: Any,
    row_of_slot: Any,
    records: Any,
    slots: Any,
    free: Any,
    needed_later: Any,
    ends: Any,
    chunks: Any,
    cursors: Any,
    fetched: Any,
    write_back: Any,
) -> int:
    """Gives a slot to each of ``rows[begin:]`` that has none; returns where it stopped for want of victims, or the end.

    ``free`` lists the slots that hold no row, ``needed_later`` those that only planned batches need; both are used from
    the end. All others are queued. ``fetched`` int32 ``[n]`` takes the positions in ``rows`` of those to fetch,
    ``write_back`` int64 ``[n, 2]`` the row and slot of each victim that may have changed since batch ``flushed``.
    """
    left = needed_later.shape[0]
    for index in range(begin, rows.shape[0]):
        entry = slots[index]
        if entry >= 0:
            continue
        if cursors[FREE] > 0:
            cursors[FREE] -= 1
            slot = free[cursors[FREE]]
        else:
            slot = next_victim(number, oldest, slot_of_row, row_of_slot, records, ends, chunks, cursors)
            if slot < 0:
                if left == 0:
                    return index
                left -= 1
                slot = needed_later[left]
            old_row = row_of_slot[slot]
            slot_of_row[old_row] = GHOST - records[slot, SCORE]
            if records[slot, LAST_USE] > flushed:
                write_back[cursors[WRITTEN_BACK], 0] = old_row
                write_back[cursors[WRITTEN_BACK], 1] = slot
                cursors[WRITTEN_BACK] += 1
            cursors[NEWEST_USE] = max(cursors[NEWEST_USE], records[slot, LAST_USE])
        records[slot, LAST_USE] = number
        records[slot, SCORE] = use if entry == ABSENT else _add_use(GHOST - entry, use)
        records[slot, LAST_PLANNED] = NO_USE
        row_of_slot[slot] = rows[index]
        slot_of_row[rows[index]] = slot
        slots[index] = slot
        fetched[cursors[FETCHED]] = index
        cursors[FETCHED] += 1
    return rows.shape[0]


@kernel
def rebase_scores(shift: int, slot_of_row: Any, records: Any) -> None:
    """Lowers every score by ``shift``, to 0 at least."""
    for row in range(slot_of_row.shape[0]):
        if slot_of_row[row] <= GHOST:
            slot_of_row[row] = GHOST - max(0, GHOST - slot_of_row[row] - shift)
    for slot in range(records.shape[0]):
        records[slot, SCORE] = max(0, records[slot, SCORE] - shift)


@kernel
def find_slots(rows: Any, slot_of_row: Any, slots: Any) -> None:
    """``slots[i]`` = the slot of ``rows[i]``, or -1; nothing is marked as used."""
    for index in range(rows.shape[0]):
        if index + ROWS_AHEAD < rows.shape[0]:
            prefetch(slot_of_row, rows[index + ROWS_AHEAD])
        slots[index] = max(-1, slot_of_row[rows[index]])
