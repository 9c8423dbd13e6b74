"""How many rows of a trace are found in a cache of a given size, under different policies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recsys_offload.embedding.cache import fits_ahead, most_batches_ahead
from recsys_offload.embedding.directory import Admission, Directory
from recsys_offload.memory.kernels import KNOWN, NOTHING_AHEAD, count_hits, count_uses_so_far, find_next_uses
from recsys_offload.memory.trace import Trace

__all__ = [
    "POLICIES",
    "Policy",
    "belady_hits",
    "directory_hits",
    "lfu_hits",
    "look_ahead_belady_hits",
    "lru_hits",
    "static_hits",
]

# LFU's keys: a count above the number of the use, which decides where counts are equal.
_USE_BITS = 40

Policy = Callable[[Trace, int, int], int]
"""The hits of a trace, given the slots and how many batches after the present one are known."""


def directory_hits(trace: Trace, slots: int, depth: int) -> int:
    """The hits of the cache that trains, its batches admitted as its pipeline admits them where nothing is slow.

    When a batch has been trained on, its slots are released. The next batch goes into training; it is admitted now if
    it did not fit before. Of those after it the cache admits what it lets in ahead. The ``depth`` batches after it are
    known in the end, but the last of them is planned only when others have been admitted without knowing it.
    """
    directory = Directory(trace.row_count, slots)
    batches = [trace.batch(number) for number in range(len(trace))]
    hits, admitted = 0, 0

    def admit_next(training: int) -> None:
        """While batch ``training`` holds its slots, or takes them."""
        nonlocal hits, admitted
        rows = batches[admitted]
        coming = [(later, batches[later]) for later in range(admitted + 1, min(training + depth, len(trace)))]
        admission = directory.admit(rows, admitted, training, coming)
        assert isinstance(admission, Admission)
        hits += len(rows) - len(admission.fetch)
        admitted += 1

    for training in range(len(trace)):
        if admitted == training:
            admit_next(training)
        while depth > 0 and admitted < min(training + depth + 1, len(trace)):
            ahead, rows = admitted - training, len(batches[admitted])
            if ahead > most_batches_ahead(depth) or not fits_ahead(ahead, directory.held(training), rows, slots):
                break
            admit_next(training)
    return hits


def lru_hits(trace: Trace, slots: int, depth: int = 0) -> int:
    """The hits where the row that was used least recently goes. ``depth`` makes no difference."""
    return count_hits(trace.rows, trace.starts, trace.row_count, slots, np.arange(len(trace.rows)), NOTHING_AHEAD)


def lfu_hits(trace: Trace, slots: int, depth: int = 0) -> int:
    """The hits where the row that has been used in the fewest batches goes, of these the least recently used.

    The uses of rows that have no slot are remembered, too. ``depth`` makes no difference.
    """
    keys = (count_uses_so_far(trace.rows, trace.row_count) << _USE_BITS) + np.arange(len(trace.rows))
    return count_hits(trace.rows, trace.starts, trace.row_count, slots, keys, NOTHING_AHEAD)


def static_hits(trace: Trace, slots: int, depth: int = 0) -> int:
    """The hits where the rows that the whole trace uses most have the slots, each from its first use on, for good.

    The first use of such a row is a miss, as under the other policies. All other rows are always misses, and take no
    slots even while their batch is present, so that this is no policy for a cache, and none bounds it. ``depth`` makes
    no difference.
    """
    counts = np.bincount(trace.rows, minlength=trace.row_count)
    chosen = np.partition(counts, len(counts) - slots)[len(counts) - slots :]
    return int(np.maximum(chosen - 1, 0).sum())


def belady_hits(trace: Trace, slots: int, depth: int = 0) -> int:
    """The most hits that any policy can have which has all rows of a batch in slots: the furthest next use goes.

    ``depth`` makes no difference: all batches are known.
    """
    keys = KNOWN - find_next_uses(trace.rows, trace.starts, trace.row_count)
    return count_hits(trace.rows, trace.starts, trace.row_count, slots, keys, NOTHING_AHEAD)


def look_ahead_belady_hits(trace: Trace, slots: int, depth: int) -> int:
    """The hits where ``depth`` batches after the present one are known, and the past as LRU knows it.

    The least recently used of the rows that none of those batches uses goes; only where all are used, the one whose
    next use is furthest.
    """
    next_uses = find_next_uses(trace.rows, trace.starts, trace.row_count)
    batch_of_use = np.repeat(np.arange(len(trace)), np.diff(trace.starts))
    known = (next_uses <= batch_of_use + depth) & (next_uses < len(trace))
    keys = np.where(known, KNOWN - next_uses, np.arange(len(trace.rows)))
    return count_hits(trace.rows, trace.starts, trace.row_count, slots, keys, depth)


POLICIES: dict[str, Policy] = {
    "ours": directory_hits,
    "LRU": lru_hits,
    "LFU": lfu_hits,
    "static": static_hits,
    "Belady": belady_hits,
    "Belady, look-ahead": look_ahead_belady_hits,
}
"""By name, in the order in which they are shown."""
