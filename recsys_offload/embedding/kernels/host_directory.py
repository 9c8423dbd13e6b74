"""Numba kernels of the directory: which slot holds a row, and which rows give up theirs.

``records`` is int32 ``[S, 4]``, one line per slot (columns below). ``slot_of_row`` is int32 ``[R]``: a slot; or
``ABSENT`` for a row that was never here; or, for one that was, ``GHOST - score``: its score is kept where its slot
was, so that it costs no memory.

A score says how much a row was used, recent uses counting more: log2 of the sum over its uses of ``2 ** (use /
half_life)``, in units of ``1 / SCORE_UNIT``. It needs no aging, because the weight of a use relative to another never
changes (forward decay: Cormode, Shkapenyuk, Srivastava and Xu, 2009; frequency and recency in one number as in LRFU:
Lee et al., 2001).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.numba_support import kernel, prefetch, prefetch_write

# Columns of ``records``: the last batch that uses the slot, its row's score, and the next batch that will use it
# among those that have no slots yet.
LAST_USE, SCORE, NEXT_USE = range(3)
RECORD_COLUMNS = 4
# Before any batch.
NO_USE = -1

# Positions in the directory's int64 ``cursors``: how many slots are free, where its two queues begin and end, and what
# the present batch has come to.
FREE, VICTIM, VICTIM_END, RECENT, RECENT_END, FETCHED, WRITTEN_BACK, NEWEST_USE = range(8)
CURSORS = 8

ABSENT, GHOST = -1, -2
NO_ROW = -1
SCORE_UNIT = 4096

ROWS_AHEAD = 48
SLOTS_AHEAD = 24
VICTIMS_AHEAD = 16

_TABLE_STEPS = 16  # per unit of log2
_SUM_TABLE = np.rint(SCORE_UNIT * np.log2(1 + 2.0 ** -(np.arange(20 * _TABLE_STEPS) / _TABLE_STEPS))).astype(np.int32)


@kernel
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

    ``slots[i]`` becomes the row's slot, or the negative entry of ``slot_of_row``. Repeating it changes nothing.
    Returns ``missing * 2**32 + held``: how many have no slot, and how many slots no unfinished batch held before.
    """
    missing, held = 0, 0
    for index in range(first, last):
        if index + ROWS_AHEAD < last:
            prefetch(slot_of_row, rows[index + ROWS_AHEAD])
        if index + SLOTS_AHEAD < last:
            ahead = slot_of_row[rows[index + SLOTS_AHEAD]]
            if ahead >= 0:
                prefetch_write(records, np.int64(ahead) * RECORD_COLUMNS)
        slot = slot_of_row[rows[index]]
        slots[index] = slot
        if slot < 0:
            missing += 1
        elif records[slot, LAST_USE] != number:
            held += records[slot, LAST_USE] < oldest
            records[slot, LAST_USE] = max(records[slot, LAST_USE], number)
            records[slot, SCORE] = _add_use(records[slot, SCORE], use)
    return missing * 2**32 + held


@kernel
def count_last_uses(slots: Any, number: int, records: Any) -> int:
    """How many of ``slots`` no batch after ``number`` uses; negative ones stand for none."""
    count = 0
    for index in range(slots.shape[0]):
        if index + SLOTS_AHEAD < slots.shape[0] and slots[index + SLOTS_AHEAD] >= 0:
            prefetch(records, np.int64(slots[index + SLOTS_AHEAD]) * RECORD_COLUMNS)
        count += slots[index] >= 0 and records[slots[index], LAST_USE] == number
    return count


@kernel
def mark_next_use(rows: Any, number: int, slot_of_row: Any, records: Any) -> None:
    """Notes that batch ``number`` will use those of ``rows`` that have a slot."""
    for index in range(rows.shape[0]):
        if index + ROWS_AHEAD < rows.shape[0]:
            prefetch(slot_of_row, rows[index + ROWS_AHEAD])
        slot = slot_of_row[rows[index]]
        if slot >= 0:
            records[slot, NEXT_USE] = number


@kernel
def list_victims(records: Any, row_of_slot: Any, number: int, oldest: int, wanted: int, victims: Any) -> int:
    """Lists the slots to take from, best first, and returns how many: at least ``wanted`` where so many are free.

    Slots that an unfinished batch uses are left out. Rows that no planned batch needs come first, lowest score first;
    then, only where those are too few, the others, the furthest next use first.
    """
    lowest, highest, idle = 2**31 - 1, -(2**31), 0
    for slot in range(records.shape[0]):
        if row_of_slot[slot] != NO_ROW and records[slot, LAST_USE] < oldest and records[slot, NEXT_USE] <= number:
            lowest = min(lowest, records[slot, SCORE])
            highest = max(highest, records[slot, SCORE])
            idle += 1
    limit = np.int64(highest)
    if idle > victims.shape[0]:
        # The score below which there are about as many as there is room for.
        buckets = np.zeros(4096, np.int64)
        width = (np.int64(highest) - lowest) // 4096 + 1
        for slot in range(records.shape[0]):
            if row_of_slot[slot] != NO_ROW and records[slot, LAST_USE] < oldest and records[slot, NEXT_USE] <= number:
                buckets[(np.int64(records[slot, SCORE]) - lowest) // width] += 1
        bucket, below = 0, buckets[0]
        while below < wanted:
            bucket += 1
            below += buckets[bucket]
        while bucket + 1 < 4096 and below + buckets[bucket + 1] <= victims.shape[0]:
            bucket += 1
            below += buckets[bucket]
        limit = lowest + (bucket + 1) * width - 1
    planned = 0
    if idle < wanted:
        for slot in range(records.shape[0]):
            planned += (
                row_of_slot[slot] != NO_ROW and records[slot, LAST_USE] < oldest and records[slot, NEXT_USE] > number
            )
    keys = np.empty(min(idle, victims.shape[0]) + planned, np.int64)
    found = np.empty(keys.shape[0], np.int32)
    count = 0
    for slot in range(records.shape[0]):
        if row_of_slot[slot] == NO_ROW or records[slot, LAST_USE] >= oldest:
            continue
        if records[slot, NEXT_USE] <= number:
            if records[slot, SCORE] <= limit and count < found.shape[0]:
                keys[count] = np.int64(records[slot, SCORE]) * 2**31 + records[slot, LAST_USE]
                found[count] = slot
                count += 1
        elif planned > 0:
            keys[count] = 2**62 - np.int64(records[slot, NEXT_USE])
            found[count] = slot
            count += 1
    order = np.argsort(keys[:count])
    kept = min(count, victims.shape[0])
    for index in range(kept):
        slot = found[order[index]]
        victims[index, 0] = slot
        victims[index, 1] = records[slot, SCORE]
        victims[index, 2] = records[slot, NEXT_USE]
    return kept


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
    victims: Any,
    recent: Any,
    cursors: Any,
    fetched: Any,
    write_back: Any,
) -> int:
    """Gives a slot to each of ``rows[begin:]`` that has none; returns where it stopped for want of victims, or the end.

    Victims are taken from two queues in order of their scores: ``victims`` int32 ``[V, 3]`` (slot, score and next use
    when they were listed) and ``recent`` int32 ``[P, 2]`` (slot and score of the rows placed since then: a row that is
    used once is the next to go, and not on the list). An entry whose row has been used since is passed over.
    ``free`` lists the slots that hold no row. ``fetched`` int32 ``[n]`` takes the positions in ``rows`` of those to
    fetch, ``write_back`` int64 ``[n, 2]`` the row and slot of each victim that may have changed since batch
    ``flushed``.
    """
    for index in range(begin, rows.shape[0]):
        entry = slots[index]
        if entry >= 0:
            continue
        if cursors[FREE] > 0:
            cursors[FREE] -= 1
            slot = free[cursors[FREE]]
        else:
            slot = _next_victim(number, oldest, records, victims, recent, cursors)
            if slot < 0:
                return index
            old_row = row_of_slot[slot]
            slot_of_row[old_row] = GHOST - records[slot, SCORE]
            if records[slot, LAST_USE] > flushed:
                write_back[cursors[WRITTEN_BACK], 0] = old_row
                write_back[cursors[WRITTEN_BACK], 1] = slot
                cursors[WRITTEN_BACK] += 1
            cursors[NEWEST_USE] = max(cursors[NEWEST_USE], records[slot, LAST_USE])
        score = use if entry == ABSENT else _add_use(GHOST - entry, use)
        records[slot, LAST_USE] = number
        records[slot, SCORE] = score
        records[slot, NEXT_USE] = NO_USE
        row_of_slot[slot] = rows[index]
        slot_of_row[rows[index]] = slot
        slots[index] = slot
        fetched[cursors[FETCHED]] = index
        cursors[FETCHED] += 1
        if cursors[RECENT_END] < recent.shape[0]:
            recent[cursors[RECENT_END], 0] = slot
            recent[cursors[RECENT_END], 1] = score
            cursors[RECENT_END] += 1
    return rows.shape[0]


@kernel
def _next_victim(number: int, oldest: int, records: Any, victims: Any, recent: Any, cursors: Any) -> int:
    """Takes the slot with the lowest score off the two queues; -1 where the list of victims is used up."""
    while cursors[VICTIM] < cursors[VICTIM_END]:
        position = cursors[VICTIM]
        if position + VICTIMS_AHEAD < cursors[VICTIM_END]:
            prefetch_write(records, np.int64(victims[position + VICTIMS_AHEAD, 0]) * RECORD_COLUMNS)
        slot = victims[position, 0]
        if (
            records[slot, LAST_USE] < oldest
            and records[slot, SCORE] == victims[position, 1]
            and records[slot, NEXT_USE] == victims[position, 2]
        ):
            break
        cursors[VICTIM] += 1
    if cursors[VICTIM] == cursors[VICTIM_END]:
        return -1
    listed = victims[cursors[VICTIM], 0]
    while cursors[RECENT] < cursors[RECENT_END]:
        slot = recent[cursors[RECENT], 0]
        if records[slot, SCORE] != recent[cursors[RECENT], 1] or records[slot, NEXT_USE] > number:
            cursors[RECENT] += 1
            continue
        if records[slot, LAST_USE] >= oldest:
            break
        if records[slot, SCORE] < records[listed, SCORE]:
            cursors[RECENT] += 1
            return slot
        break
    cursors[VICTIM] += 1
    return listed


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
