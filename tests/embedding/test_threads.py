"""Work is cut in parts that cover it once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_offload.embedding.threads import KernelThreads


@given(length=st.integers(0, 100), count=st.integers(1, 9))
def test_even_bounds_cover_everything_once(length: int, count: int) -> None:
    results = KernelThreads(count).run(range, KernelThreads(count).even_bounds(length))
    assert sorted(item for part in results for item in part) == list(range(length))


@given(costs=st.lists(st.integers(0, 50), max_size=60), count=st.integers(1, 9))
def test_cost_bounds_cover_everything_once_and_balance(costs: list[int], count: int) -> None:
    threads = KernelThreads(count)
    cumulative = np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])
    results = threads.run(range, threads.cost_bounds(cumulative))
    assert sorted(item for part in results for item in part) == list(range(len(costs)))
    parts = 1 if count == 1 else 8 * count
    heaviest = max((sum(costs[item] for item in part) for part in results), default=0)
    assert heaviest <= sum(costs) / parts + max(costs, default=0) + 1


@pytest.mark.parametrize("failing", [0, 7])
def test_an_error_in_any_part_reaches_the_caller_and_the_threads_work_on(failing: int) -> None:
    threads = KernelThreads(3)

    def kernel(first: int, last: int) -> int:
        if first <= failing < last:
            raise ValueError(f"part {first}")
        return threading.get_ident()

    with pytest.raises(ValueError, match="part"):
        threads.run(kernel, threads.even_bounds(24))
    assert len(threads.run(lambda first, last: last - first, threads.even_bounds(24))) == 24
