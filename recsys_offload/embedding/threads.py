"""Threads for kernels that release the GIL: a range of work is cut in parts, one per thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")


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
        self._pool = ThreadPoolExecutor(self.count - 1, "embedding") if self.count > 1 else None

    def run(self, kernel: Callable[..., Result], bounds: Sequence[int], *arguments: object) -> list[Result]:
        """Calls ``kernel(first, last, *arguments)`` for each pair of neighbours in ``bounds`` and waits for all.

        Returns the results in the order of the parts. An empty part is not called.
        """
        parts = [(first, last) for first, last in pairwise(bounds) if first < last]
        if self._pool is None or len(parts) < 2:
            return [kernel(first, last, *arguments) for first, last in parts]
        pending = [self._pool.submit(kernel, first, last, *arguments) for first, last in parts[1:]]
        results = [kernel(*parts[0], *arguments)]
        return results + [future.result() for future in pending]

    def even_bounds(self, length: int) -> list[int]:
        """Bounds that cut ``length`` items in parts of nearly equal size."""
        return [length * part // self.count for part in range(self.count + 1)]

    def cost_bounds(self, cumulative_cost: np.ndarray) -> list[int]:
        """Bounds that cut items in parts of nearly equal cost.

        Args:
            cumulative_cost: ``[items + 1]``, rising from its first value: the cost of all items before each.
        """
        start, stop = int(cumulative_cost[0]), int(cumulative_cost[-1])
        targets = start + (stop - start) * np.arange(1, self.count) // self.count
        inner = np.searchsorted(cumulative_cost, targets)
        return [0, *inner.tolist(), len(cumulative_cost) - 1]
