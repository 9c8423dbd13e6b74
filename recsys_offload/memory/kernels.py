"""Numba kernels that replay a trace through caches.

A policy is a key for every use of a row: of the rows that have a slot and are not in the present batch, the one whose
last use has the lowest key gives its slot up. The heaps hold (key, row) entries; one whose row has another key by now
is out of date and passed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.numba_support import kernel

# The key of a row that has no slot.
ABSENT = -(2**63)
# A use in batch n that is known ahead has the key ``KNOWN - n``, above the keys of all rows whose next use is unknown.
KNOWN = 2**62
# For `count_hits`: nothing is known ahead but what the keys say.
NOTHING_AHEAD = -1


@kernel
def append_distinct(rows: Any, number: int, last_number: Any, output: Any) -> int:
    """Writes each of ``rows`` (int64 ``[n]``) once into ``output``, as they first occur; returns how many.

    ``last_number`` int32 ``[R]`` holds the last batch in which each row occurred; ``number`` is that of this one.
    """
    count = 0
    for index in range(rows.shape[0]):
        row = rows[index]
        if last_number[row] != number:
            last_number[row] = number
            output[count] = row
            count += 1
    return count


@kernel
def find_next_uses(rows: Any, starts: Any, row_count: int) -> Any:
    """int64 ``[N]``: for each use, the next batch that uses the row; the number of batches where none does."""
    batches = starts.shape[0] - 1
    upcoming = np.full(row_count, batches, np.int64)
    result = np.empty(rows.shape[0], np.int64)
    for batch in range(batches - 1, -1, -1):
        for use in range(starts[batch], starts[batch + 1]):
            result[use] = upcoming[rows[use]]
            upcoming[rows[use]] = batch
    return result


@kernel
def count_uses_so_far(rows: Any, row_count: int) -> Any:
    """int64 ``[N]``: for each use, how many there have been of its row, itself included."""
    counts = np.zeros(row_count, np.int64)
    result = np.empty(rows.shape[0], np.int64)
    for use in range(rows.shape[0]):
        counts[rows[use]] += 1
        result[use] = counts[rows[use]]
    return result


@kernel
def _sift_down(keys: Any, rows: Any, size: int, position: int) -> None:
    """Moves the entry at ``position`` of a heap down to where it belongs."""
    key, row = keys[position], rows[position]
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[position], rows[position] = keys[child], rows[child]
        position = child
    keys[position], rows[position] = key, row


@kernel
def _without_outdated(keys: Any, rows: Any, size: int, key_of_row: Any) -> int:
    """Takes the entries that are out of date out of a heap; returns how many are left."""
    left = 0
    for position in range(size):
        if key_of_row[rows[position]] == keys[position]:
            keys[left], rows[left] = keys[position], rows[position]
            left += 1
    for position in range(left // 2 - 1, -1, -1):
        _sift_down(keys, rows, left, position)
    return left


@kernel
def _push(keys: Any, rows: Any, size: int, key: int, row: int, key_of_row: Any) -> int:
    """Adds an entry to a heap; returns its new size. There is room for twice as many as can be up to date."""
    if size == keys.shape[0]:
        size = _without_outdated(keys, rows, size, key_of_row)
    position = size
    while position > 0 and keys[(position - 1) // 2] > key:
        parent = (position - 1) // 2
        keys[position], rows[position] = keys[parent], rows[parent]
        position = parent
    keys[position], rows[position] = key, row
    return size + 1


@kernel
def count_hits(rows: Any, starts: Any, row_count: int, slots: int, use_keys: Any, ahead: int) -> int:
    """How many uses found their row in a slot, the cache being empty at first.

    Args:
        rows: int64 ``[N]``: the distinct rows of each batch, batch after batch.
        starts: int64 ``[B + 1]``: where each batch begins.
        row_count: rows of the tables.
        slots: of the cache, at least as many as the largest batch has rows.
        use_keys: int64 ``[N]``: the key that each use gives to its row; each differs from the row's others.
        ahead: how many batches after the present one are known: their rows are kept, the nearest use first, before
            those of other rows. ``NOTHING_AHEAD``: the keys say it all.
    """
    key_of_row = np.full(row_count, ABSENT, np.int64)
    heap_keys, heap_rows = np.empty(2 * slots, np.int64), np.empty(2 * slots, np.int64)
    size, residents, hits = 0, 0, 0
    batches = starts.shape[0] - 1
    for batch in range(batches):
        if ahead > 0 and batch + ahead < batches:
            known = KNOWN - (batch + ahead)
            for use in range(starts[batch + ahead], starts[batch + ahead + 1]):
                row = rows[use]
                if key_of_row[row] != ABSENT and key_of_row[row] < known:
                    key_of_row[row] = known
                    size = _push(heap_keys, heap_rows, size, known, row, key_of_row)
        first, last = starts[batch], starts[batch + 1]
        for use in range(first, last):
            if key_of_row[rows[use]] != ABSENT:
                hits += 1
            else:
                residents += 1
            # Makes the entries of the batch's rows out of date: none of them can be taken before the new one is pushed.
            key_of_row[rows[use]] = use_keys[use]
        while residents > slots:
            key, row = heap_keys[0], heap_rows[0]
            size -= 1
            heap_keys[0], heap_rows[0] = heap_keys[size], heap_rows[size]
            _sift_down(heap_keys, heap_rows, size, 0)
            if key_of_row[row] == key:
                key_of_row[row] = ABSENT
                residents -= 1
        for use in range(first, last):
            size = _push(heap_keys, heap_rows, size, use_keys[use], rows[use], key_of_row)
    return hits
