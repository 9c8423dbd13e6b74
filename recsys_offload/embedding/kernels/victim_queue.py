"""Numba kernels of the queue of victims: every slot that may be given up, the one with the lowest score first.

A slot is queued when the last batch that uses it is finished, in the bucket of its row's score; within a bucket the
first in is the first out. Nothing is taken out when a slot is used again or its score rises: it is looked at when its
turn comes, and then goes to the bucket where it belongs, or is left out because a batch holds it (which will queue it
again). So a use costs nothing, and a victim takes constant time, whatever the size of the cache.

Buckets are the last ``BUCKETS`` multiples of ``BUCKET_WIDTH`` up to the highest score there can be, in a ring; what
is lower is in the lowest. ``ends`` int32 ``[BUCKETS, 3]`` holds each bucket's first chunk, the position in it, and its
last chunk. ``chunks`` int32 ``[C, 16]`` are cache lines: the next chunk, how far it is filled, and the slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.numba_support import inlined, kernel, prefetch, prefetch_write

# Columns of ``records``, int32 ``[S, 8]``, half a cache line per slot: the last batch that uses it, its row's score,
# the last planned batch that will use it, the first one (known only while `mark_first_planned` says it), whether it is
# queued, and, in the last two, its row (`row_of_slot` is a view of them).
LAST_USE, SCORE, LAST_PLANNED, FIRST_PLANNED, QUEUED = range(5)
RECORD_COLUMNS = 8
ROW_COLUMN = 3  # of the records seen as int64
NO_ROW = -1

# Positions in the directory's int64 ``cursors``: how many slots are free; the lowest bucket that may hold something,
# and the highest one; the first of the unused chunks; and what the present batch has come to.
FREE, BOTTOM, TOP, UNUSED_CHUNK, FETCHED, WRITTEN_BACK, NEWEST_USE = range(7)
CURSORS = 7

SCORE_UNIT = 4096
BUCKET_WIDTH = SCORE_UNIT // 64
BUCKETS = 4096
# The highest bucket is so far above a single use: no score reaches it.
ROOM_ABOVE_USE = 32 * SCORE_UNIT

FIRST_CHUNK, POSITION, LAST_CHUNK = range(3)
ENDS_COLUMNS = 3
NEXT_CHUNK, FILLED, FIRST_ENTRY, CHUNK_COLUMNS = 0, 1, 2, 16
NONE = -1


def chunk_count(slots: int) -> int:
    """How many chunks are enough that it is rare to run out of them."""
    entries = CHUNK_COLUMNS - FIRST_ENTRY
    return min(slots, 2 * slots // entries + 2 * BUCKETS) + 1


@kernel
def refill(slots: Any, use: int, records: Any, ends: Any, chunks: Any, cursors: Any) -> None:
    """Empties the queue, and queues ``slots`` in their order; a single use is worth ``use`` at present."""
    ends[:, FIRST_CHUNK] = NONE
    for chunk in range(chunks.shape[0]):
        chunks[chunk, NEXT_CHUNK] = chunk + 1
    chunks[chunks.shape[0] - 1, NEXT_CHUNK] = NONE
    cursors[UNUSED_CHUNK] = 0
    cursors[TOP] = (use + ROOM_ABOVE_USE) // BUCKET_WIDTH
    cursors[BOTTOM] = cursors[TOP]
    for slot in slots:
        records[slot, QUEUED] = 1
        _append(slot, _bucket(slot, records, cursors), ends, chunks, cursors)


@kernel
def queued_slots(ends: Any, chunks: Any, cursors: Any, slots: Any) -> int:
    """Lists what is queued, in order, in ``slots`` int32 ``[S]``; returns how many there are."""
    count = 0
    for bucket in range(max(cursors[BOTTOM], cursors[TOP] - BUCKETS + 1), cursors[TOP] + 1):
        chunk, position = ends[bucket % BUCKETS, FIRST_CHUNK], ends[bucket % BUCKETS, POSITION]
        while chunk != NONE:
            for entry in range(position, chunks[chunk, FILLED]):
                slots[count] = chunks[chunk, entry]
                count += 1
            chunk, position = chunks[chunk, NEXT_CHUNK], FIRST_ENTRY
    return count


@inlined
def _bucket(slot: int, records: Any, cursors: Any) -> int:
    return max(np.int64(records[slot, SCORE]) // BUCKET_WIDTH, cursors[TOP] - BUCKETS + 1)


@inlined
def _append(slot: int, bucket: int, ends: Any, chunks: Any, cursors: Any) -> None:
    """Puts a slot at the end of a bucket; there must be an unused chunk."""
    place = bucket % BUCKETS
    chunk = ends[place, LAST_CHUNK]
    if ends[place, FIRST_CHUNK] == NONE or chunks[chunk, FILLED] == CHUNK_COLUMNS:
        fresh = cursors[UNUSED_CHUNK]
        cursors[UNUSED_CHUNK] = chunks[fresh, NEXT_CHUNK]
        chunks[fresh, NEXT_CHUNK], chunks[fresh, FILLED] = NONE, FIRST_ENTRY
        if ends[place, FIRST_CHUNK] == NONE:
            ends[place, FIRST_CHUNK], ends[place, POSITION] = fresh, FIRST_ENTRY
        else:
            chunks[chunk, NEXT_CHUNK] = fresh
        ends[place, LAST_CHUNK] = chunk = fresh
    chunks[chunk, chunks[chunk, FILLED]] = slot
    chunks[chunk, FILLED] += 1
    cursors[BOTTOM] = min(cursors[BOTTOM], bucket)


@kernel
def queue_slot(slot: int, use: int, records: Any, ends: Any, chunks: Any, cursors: Any) -> None:
    """Queues a slot that is not queued."""
    if cursors[UNUSED_CHUNK] == NONE:  # too many chunks are partly filled
        queued = np.empty(records.shape[0], np.int32)
        refill(queued[: queued_slots(ends, chunks, cursors, queued)], use, records, ends, chunks, cursors)
    records[slot, QUEUED] = 1
    _append(slot, _bucket(slot, records, cursors), ends, chunks, cursors)


@kernel
def raise_top(use: int, ends: Any, chunks: Any, cursors: Any) -> None:
    """Makes room for higher scores, now that a single use is worth ``use``: the lowest buckets become one."""
    top = (use + ROOM_ABOVE_USE) // BUCKET_WIDTH
    lowest = top - BUCKETS + 1
    for bucket in range(max(cursors[BOTTOM], cursors[TOP] - BUCKETS + 1), min(lowest, cursors[TOP])):
        place, above = bucket % BUCKETS, (bucket + 1) % BUCKETS
        if ends[place, FIRST_CHUNK] == NONE:
            continue
        if ends[above, FIRST_CHUNK] == NONE:
            ends[above, LAST_CHUNK] = ends[place, LAST_CHUNK]
        else:
            _skip_taken(above, ends, chunks)
            chunks[ends[place, LAST_CHUNK], NEXT_CHUNK] = ends[above, FIRST_CHUNK]
        ends[above, FIRST_CHUNK], ends[above, POSITION] = ends[place, FIRST_CHUNK], ends[place, POSITION]
        ends[place, FIRST_CHUNK] = NONE
    cursors[TOP] = max(cursors[TOP], top)
    cursors[BOTTOM] = max(cursors[BOTTOM], lowest)


@kernel
def _skip_taken(place: int, ends: Any, chunks: Any) -> None:
    """Moves what is left of a bucket's first chunk to its beginning."""
    chunk, taken = ends[place, FIRST_CHUNK], ends[place, POSITION] - FIRST_ENTRY
    for position in range(ends[place, POSITION], chunks[chunk, FILLED]):
        chunks[chunk, position - taken] = chunks[chunk, position]
    chunks[chunk, FILLED] -= taken
    ends[place, POSITION] = FIRST_ENTRY


@inlined
def _take_first(
    bucket: int, slot_of_row: Any, row_of_slot: Any, records: Any, ends: Any, chunks: Any, cursors: Any
) -> int:
    """Takes the first slot off a bucket that is not empty."""
    place = bucket % BUCKETS
    chunk, position = ends[place, FIRST_CHUNK], ends[place, POSITION]
    following = chunks[chunk, NEXT_CHUNK]
    if position == FIRST_ENTRY:
        # The chunk's records have been asked for when the one before it was begun.
        for entry in range(FIRST_ENTRY, chunks[chunk, FILLED]):
            prefetch_write(slot_of_row, row_of_slot[chunks[chunk, entry]])
        if following != NONE:
            for entry in range(FIRST_ENTRY, chunks[following, FILLED]):
                prefetch_write(records, np.int64(chunks[following, entry]) * RECORD_COLUMNS)
            if chunks[following, NEXT_CHUNK] != NONE:
                prefetch(chunks, np.int64(chunks[following, NEXT_CHUNK]) * CHUNK_COLUMNS)
    slot = chunks[chunk, position]
    ends[place, POSITION] += 1
    if ends[place, POSITION] == chunks[chunk, FILLED]:
        ends[place, FIRST_CHUNK], ends[place, POSITION] = following, FIRST_ENTRY
        chunks[chunk, NEXT_CHUNK] = cursors[UNUSED_CHUNK]
        cursors[UNUSED_CHUNK] = chunk
    return slot


@inlined
def next_victim(
    number: int,
    oldest: int,
    slot_of_row: Any,
    row_of_slot: Any,
    records: Any,
    ends: Any,
    chunks: Any,
    cursors: Any,
) -> int:
    """Takes the slot with the lowest score that no unfinished or planned batch uses; -1 where there is none.

    Batches from ``oldest`` to ``number`` are unfinished, later ones planned.
    """
    while cursors[BOTTOM] <= cursors[TOP]:
        bucket = cursors[BOTTOM]
        if ends[bucket % BUCKETS, FIRST_CHUNK] == NONE:
            cursors[BOTTOM] += 1
            continue
        slot = _take_first(bucket, slot_of_row, row_of_slot, records, ends, chunks, cursors)
        if records[slot, LAST_USE] >= oldest or records[slot, LAST_PLANNED] > number:
            records[slot, QUEUED] = 0
        elif _bucket(slot, records, cursors) > bucket:
            _append(slot, _bucket(slot, records, cursors), ends, chunks, cursors)
        else:
            records[slot, QUEUED] = 0
            return slot
    return -1
