"""What the cache counts: sums, what is derived from them, differences, and spans on request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import pairwise

import pytest

from recsys_offload.embedding.statistics import CacheCounts, CacheStatistics, Span

THREADS = 8
TIMES = 2000


def in_threads(work: Callable[[int], None]) -> None:
    """Runs ``work`` in several threads that start together."""
    together = threading.Barrier(THREADS)

    def run(number: int) -> None:
        together.wait()
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def numbered() -> CacheCounts:
    """Counts of which no two are the same."""
    return CacheCounts(**{one.name: 10 + place for place, one in enumerate(fields(CacheCounts))})


def test_the_hit_rate_is_that_of_the_rows_used() -> None:
    assert CacheCounts(rows=8, hits=6, batches=2, fetched=2).hit_rate == 0.75
    assert CacheCounts(rows=8).hit_rate == 0.0
    assert CacheCounts().hit_rate == 1.0


def test_moves_are_hidden_as_far_as_training_does_not_wait() -> None:
    assert CacheCounts(moving_seconds=3.0, stalled_seconds=1.0).hidden_seconds == 2.0
    assert CacheCounts(moving_seconds=1.0, stalled_seconds=3.0).hidden_seconds == 0.0
    assert CacheCounts(moving_seconds=3.0, waiting_seconds=1.0).hidden_seconds == 3.0


def test_values_are_all_counts_and_what_is_derived_from_them() -> None:
    counts = numbered()
    values = counts.values()
    assert values.pop("hit_rate") == counts.hits / counts.rows
    assert values.pop("hidden_seconds") == counts.moving_seconds - counts.stalled_seconds
    assert values == asdict(counts)


def test_differences_and_sums_take_every_count() -> None:
    more = CacheCounts(**{name: 3 * value for name, value in asdict(numbered()).items()})
    twice = CacheCounts(**{name: 2 * value for name, value in asdict(numbered()).items()})
    assert more.since(numbered()) == twice
    assert numbered().plus(twice) == more
    assert numbered().since(numbered()) == CacheCounts()
    assert numbered().plus(CacheCounts()) == numbered()


def test_the_hit_rate_of_a_difference_is_that_of_the_batches_in_between() -> None:
    earlier, later = CacheCounts(rows=100, hits=10), CacheCounts(rows=110, hits=19)
    assert later.since(earlier).hit_rate == 0.9


def test_counts_are_a_copy() -> None:
    statistics = CacheStatistics()
    statistics.add(rows=3, hits=1, stalled_seconds=0.5)
    before = statistics.counts()
    statistics.add(rows=2)
    before.hits = 100
    assert before == CacheCounts(rows=3, hits=100, stalled_seconds=0.5)
    assert statistics.counts() == CacheCounts(rows=5, hits=1, stalled_seconds=0.5)
    assert statistics.counts().since(before).rows == 2


def test_what_nobody_counts_cannot_be_added() -> None:
    statistics = CacheStatistics()
    with pytest.raises(AttributeError):
        statistics.add(misses=1)
    assert statistics.counts() == CacheCounts()


def test_counts_of_no_thread_are_lost_and_none_are_seen_half_added() -> None:
    statistics = CacheStatistics()
    torn: list[CacheCounts] = []

    def work(number: int) -> None:
        for _ in range(TIMES):
            statistics.add(rows=2, hits=1, moving_seconds=0.5)
            counts = statistics.counts()
            if counts.rows != 2 * counts.hits or counts.moving_seconds != 0.5 * counts.hits:
                torn.append(counts)

    in_threads(work)
    total = THREADS * TIMES
    assert statistics.counts() == CacheCounts(rows=2 * total, hits=total, moving_seconds=0.5 * total)
    assert not torn


def test_spans_are_collected_on_request_and_taken_once() -> None:
    statistics = CacheStatistics()
    statistics.span("training", "lookup", 1.0, 2.0)
    assert statistics.spans() == []
    statistics.tracing = True
    statistics.span("training", "lookup", 3.0, 4.0)
    statistics.span("plan ahead", "plan", 2.0, 5.0)
    statistics.tracing = False
    statistics.span("training", "update", 5.0, 6.0)
    assert statistics.spans() == [Span("training", "lookup", 3.0, 4.0), Span("plan ahead", "plan", 2.0, 5.0)]
    assert statistics.spans() == []
    assert statistics.counts() == CacheCounts()


@pytest.mark.parametrize("tracing", [False, True])
def test_moves_are_timed_always_and_traced_on_request(tracing: bool) -> None:
    statistics = CacheStatistics()
    statistics.tracing = tracing
    statistics.moved("fetch", 1.0, 1.5)
    statistics.moved("write back", 2.0, 2.25)
    assert statistics.counts() == CacheCounts(moving_seconds=0.75)
    expected = [Span("move rows", "fetch", 1.0, 1.5), Span("move rows", "write back", 2.0, 2.25)]
    assert statistics.spans() == (expected if tracing else [])


def test_spans_of_no_thread_are_lost_or_handed_out_twice() -> None:
    statistics = CacheStatistics()
    statistics.tracing = True
    taken: list[list[Span]] = [[] for _ in range(THREADS)]

    def work(number: int) -> None:
        for time in range(TIMES // 10):
            statistics.span(str(number), "work", time, time + 1)
            taken[number].extend(statistics.spans())

    in_threads(work)
    spans = [span for part in taken for span in part] + statistics.spans()
    assert len(spans) == len(set(spans)) == THREADS * (TIMES // 10)
    for part in taken:  # those of one thread come in their order
        for number in range(THREADS):
            starts = [span.start for span in part if span.lane == str(number)]
            assert all(earlier < later for earlier, later in pairwise(starts))
