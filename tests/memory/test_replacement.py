"""The kernels against policies written as plainly as possible, and the directory against what the cache counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings
from recsys_offload.embedding.directory import Admission, Directory
from recsys_offload.embedding.request import Request
from recsys_offload.memory.replacement import (
    POLICIES,
    belady_hits,
    directory_hits,
    lfu_hits,
    look_ahead_belady_hits,
    lru_hits,
    static_hits,
)
from recsys_offload.memory.trace import Trace, make_trace

Batches = list[list[int]]
Value = Callable[[Batches, int, int], tuple[float, ...]]
"""The worth of a row: (batches, number of the present batch, row). The lowest goes."""


@st.composite
def traces(draw: st.DrawFn) -> tuple[Trace, int]:
    """A trace of few rows, and slots from just enough to plenty."""
    row_count = draw(st.integers(1, 20))
    batch = st.lists(st.integers(0, row_count - 1), min_size=1, max_size=6)
    batches = draw(st.lists(batch, min_size=1, max_size=30))
    trace = make_trace([np.array(rows) for rows in batches], row_count, ["rows"])
    return trace, draw(st.integers(trace.largest_batch, row_count))


def as_lists(trace: Trace) -> Batches:
    return [trace.batch(number).tolist() for number in range(len(trace))]


def hits_in_python(trace: Trace, slots: int, value: Value) -> int:
    """Replays a trace; whenever a row has to go, all rows are looked at."""
    batches, cached, hits = as_lists(trace), set[int](), 0
    for number, rows in enumerate(batches):
        hits += len(cached & set(rows))
        cached |= set(rows)
        while len(cached) > slots:
            others = cached - set(rows)
            cached.remove(min(others, key=lambda row, number=number: value(batches, number, row)))  # type: ignore[misc]
    return hits


def last_use(batches: Batches, number: int, row: int) -> tuple[float, ...]:
    last = max(earlier for earlier in range(number) if row in batches[earlier])
    return last, batches[last].index(row)


def past_uses(batches: Batches, number: int, row: int) -> tuple[float, ...]:
    return sum(row in rows for rows in batches[:number]), *last_use(batches, number, row)


def next_use(batches: Batches, number: int, row: int) -> tuple[float, ...]:
    uses = [later for later in range(number + 1, len(batches)) if row in batches[later]]
    return (-min(uses, default=len(batches)),)


def known_next_use(depth: int) -> Value:
    def value(batches: Batches, number: int, row: int) -> tuple[float, ...]:
        known = next_use(batches[: number + depth + 1], number, row)
        if any(row in rows for rows in batches[number + 1 : number + depth + 1]):
            return 1, *known
        return 0, *last_use(batches, number, row)

    return value


@given(traces())
def test_lru(drawn: tuple[Trace, int]) -> None:
    assert lru_hits(*drawn) == hits_in_python(*drawn, last_use)


@given(traces())
def test_lfu_counts_all_past_batches(drawn: tuple[Trace, int]) -> None:
    assert lfu_hits(*drawn) == hits_in_python(*drawn, past_uses)


@given(traces())
def test_belady(drawn: tuple[Trace, int]) -> None:
    assert belady_hits(*drawn) == hits_in_python(*drawn, next_use)


@given(traces(), st.integers(0, 8))
def test_belady_with_look_ahead(drawn: tuple[Trace, int], depth: int) -> None:
    assert look_ahead_belady_hits(*drawn, depth) == hits_in_python(*drawn, known_next_use(depth))


@given(traces())
def test_static_frequency(drawn: tuple[Trace, int]) -> None:
    trace, slots = drawn
    counts = sorted(np.bincount(trace.rows).tolist(), reverse=True)
    assert static_hits(trace, slots) == sum(count - 1 for count in counts[:slots] if count)


def most_hits(trace: Trace, slots: int) -> int:
    """The most hits that any choice of rows to keep can have, by trying them all."""
    batches = as_lists(trace)
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for rows in map(frozenset, batches):
        following: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            others = sorted(cached - rows)
            for choice in range(2 ** len(others)):
                kept = rows | {row for bit, row in enumerate(others) if choice >> bit & 1}
                if len(kept) <= slots:
                    following[kept] = max(following.get(kept, 0), hits + len(cached & rows))
        best = following
    return max(best.values())


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=10), st.integers(3, 6))
def test_no_choice_has_more_hits_than_belady(batches: list[set[int]], slots: int) -> None:
    trace = make_trace([np.array(sorted(rows)) for rows in batches], 6, ["rows"])
    assert belady_hits(trace, slots) == most_hits(trace, slots)


@given(traces(), st.integers(0, 8))
def test_belady_bounds_the_other_policies(drawn: tuple[Trace, int], depth: int) -> None:
    trace, slots = drawn
    for name, hits in POLICIES.items():
        if name != "static":
            assert hits(trace, slots, depth) <= belady_hits(trace, slots), name
    # Its other rows take no slots; with slots for them it would be a policy for a cache.
    assert static_hits(trace, slots) <= belady_hits(trace, slots + trace.largest_batch)


@given(traces())
def test_belady_is_look_ahead_over_the_whole_trace(drawn: tuple[Trace, int]) -> None:
    trace, slots = drawn
    assert look_ahead_belady_hits(trace, slots, len(trace)) == belady_hits(trace, slots)


def test_a_long_trace_through_few_slots() -> None:
    """Most entries of the heaps are out of date here, and are cleared away many times."""
    random = np.random.default_rng(0)
    ids = (100 * random.random((150, 10)) ** 3).astype(np.int64)
    trace = make_trace(ids, 100, ["rows"])
    for slots in (trace.largest_batch, 25):
        assert lru_hits(trace, slots) == hits_in_python(trace, slots, last_use)
        assert lfu_hits(trace, slots) == hits_in_python(trace, slots, past_uses)
        assert look_ahead_belady_hits(trace, slots, 3) == hits_in_python(trace, slots, known_next_use(3))


def test_the_rows_of_a_trace_are_distinct_in_each_batch_as_they_first_occur() -> None:
    batches = [np.array([4, 1, 4]), np.empty(0, np.int64), np.array([1, 1, 0])]
    trace = make_trace(batches, 5, ["rows"])
    assert as_lists(trace) == [[4, 1], [1, 0]]
    assert trace.largest_batch == 2


def skewed_batches(row_count: int, count: int, size: int) -> list[KeyedJaggedTensor]:
    random = np.random.default_rng(row_count)
    batches = []
    for _ in range(count):
        values = torch.from_numpy((row_count * random.random(2 * size) ** 4).astype(np.int64))
        batches.append(KeyedJaggedTensor(["user", "item"], values, lengths=torch.ones(2 * size, dtype=torch.int64)))
    return batches


def collection_of(row_count: int, slots: int) -> HostEmbeddingBagCollection:
    """Two tables that share a cache which may not grow."""
    return HostEmbeddingBagCollection(
        [EmbeddingBagConfig(row_count, 2, name, feature_names=[name]) for name in ("user", "item")],
        optimizer=SparseOptimizerSettings(name="sgd", learning_rate=0.1),
        threads=1,
        placements={"user": "cached", "item": "cached"},
        cache=CacheSettings(size=slots, limit=slots),
    ).train()


def trace_of(batches: list[KeyedJaggedTensor], row_count: int) -> Trace:
    rows = [torch.cat([batch["user"].values(), batch["item"].values() + row_count]).numpy() for batch in batches]
    return make_trace(rows, 2 * row_count, ["user", "item"])


def drive(collection: HostEmbeddingBagCollection, batches: list[KeyedJaggedTensor], depth: int) -> int:
    """Drives a collection as `prefetch` does, each of its threads being as fast as it may be; returns the hits."""
    requests: list[Request] = []
    admitted = 0

    def plan(count: int) -> None:
        requests.extend(collection.plan(batch) for batch in batches[len(requests) : count])

    def admit(*, must: bool) -> None:
        nonlocal admitted
        while must or (admitted < len(requests) and collection.has_room_ahead(requests[admitted], max(1, depth // 2))):
            assert collection.admit(requests[admitted], requests[admitted + 1 :], may_grow=must)
            admitted += 1
            must = False

    for training in range(len(batches)):
        plan(training + depth)
        if admitted == training:
            admit(must=True)
        admit(must=False)  # as soon as the batch before has released its slots, and before another is planned
        plan(training + depth + 1)
        admit(must=False)
        collection(batches[training]).values().sum().backward()
    return collection.statistics.counts().hits


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """What directories are asked from now on: a batch, the oldest unfinished one, and those that are coming."""
    calls = []
    admit = Directory.admit

    def noting(
        self: Directory, rows: np.ndarray, number: int, oldest: int, coming: Sequence[tuple[int, np.ndarray]] = ()
    ) -> Admission | int:
        calls.append((number, oldest, [later for later, _ in coming]))
        return admit(self, rows, number, oldest, coming)

    monkeypatch.setattr(Directory, "admit", noting)
    return calls


@pytest.mark.parametrize("size", [12, 2])  # of small batches, the cache lets in as many as the depth allows
def test_ours_is_what_a_collection_does(size: int, admissions: list[tuple[int, int, list[int]]]) -> None:
    row_count = 400
    batches = skewed_batches(row_count, 80, size)
    trace = trace_of(batches, row_count)
    for depth in (1, 2, 4, 7):
        for slots in (trace.largest_batch, 2 * trace.largest_batch, 200, 790):
            hits = drive(collection_of(row_count, slots), batches, depth)
            in_training = admissions.copy()
            admissions.clear()
            assert directory_hits(trace, slots, depth) == hits, (depth, slots)
            assert admissions == in_training, (depth, slots)
            admissions.clear()


def test_ours_is_what_prefetch_counts_where_nothing_happens_ahead() -> None:
    row_count = 300
    batches = skewed_batches(row_count, 80, 10)
    trace = trace_of(batches, row_count)
    for slots in (trace.largest_batch, 100):
        collection = collection_of(row_count, slots)
        for batch in prefetch(batches, collection, 0):
            collection(batch).values().sum().backward()
        assert directory_hits(trace, slots, 0) == collection.statistics.counts().hits


def test_ours_looks_ahead_further_with_more_depth() -> None:
    trace = trace_of(skewed_batches(2000, 200, 30), 2000)
    deeper, deep, shallow = (directory_hits(trace, 400, depth) for depth in (8, 4, 1))
    assert deeper > deep > shallow > lru_hits(trace, 400)
