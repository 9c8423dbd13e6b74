"""Threads for kernels that release the GIL: a range of work is cut in parts, which the threads take as they come."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")

# More parts than threads, so that a thread which starts late or is held up leaves its work to the others.
PARTS_PER_THREAD = 8


def available_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


class KernelThreads:
    """A fixed number of threads, the caller's among them."""

    def __init__(self, count: int | None = None) -> None:
        """Args:
        count: how many threads; by default one per core that this process may use.
        """
        self.count = available_threads() if count is None else count
        self._parts = 1 if self.count == 1 else self.count * PARTS_PER_THREAD
        self._pool = ThreadPoolExecutor(self.count - 1, "embedding") if self.count > 1 else None

    def run(self, kernel: Callable[..., Result], bounds: Sequence[int], *arguments: object) -> list[Result]:
        """Calls ``kernel(first, last, *arguments)`` for each pair of neighbours in ``bounds`` and waits for all.

        Returns the results, in no particular order. An empty part is not called.
        """
        parts = iter([(first, last) for first, last in pairwise(bounds) if first < last])

        def work() -> list[Result]:
            # Taking the next part is one operation under the GIL.
            return [kernel(first, last, *arguments) for first, last in parts]

        if self._pool is None:
            return work()
        helpers = [self._pool.submit(work) for _ in range(self.count - 1)]
        try:
            results = work()
        finally:
            # Also after an error: they use the arguments, which the caller may then free.
            errors = [helper.exception() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error
        return sum((helper.result() for helper in helpers), results)

    def even_bounds(self, length: int) -> list[int]:
        """Bounds that cut ``length`` items in parts of nearly equal size."""
        return [length * part // self._parts for part in range(self._parts + 1)]

    def cost_bounds(self, cumulative_cost: np.ndarray) -> list[int]:
        """Bounds that cut items in parts of nearly equal cost.

        Args:
            cumulative_cost: ``[items + 1]``, rising from its first value: the cost of all items before each.
        """
        start, stop = int(cumulative_cost[0]), int(cumulative_cost[-1])
        targets = start + (stop - start) * np.arange(1, self._parts) // self._parts
        inner = np.searchsorted(cumulative_cost, targets)
        return [0, *inner.tolist(), len(cumulative_cost) - 1]
