"""An iterator on a thread: order, errors, and an end in every case."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from recsys_offload.data.background import BackgroundIterator


def running() -> bool:
    return any(thread.name == "under test" for thread in threading.enumerate())


def ends(limit: float = 5.0) -> bool:
    """Whether the thread ends by itself."""
    deadline = time.monotonic() + limit
    while running() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not running()


class Source:
    """Counts, and notes what was asked of it."""

    def __init__(self, end: int, error: BaseException | None = None) -> None:
        self.end, self.error = end, error
        self.made, self.closed = 0, False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.made == self.end:
            raise self.error or StopIteration
        self.made += 1
        return self.made

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_items_come_in_order_and_the_thread_ends(depth: int) -> None:
    source = Source(50)
    iterator = BackgroundIterator(source, depth, "under test")
    assert list(iterator) == list(range(1, 51))
    assert source.closed and not running()
    assert list(iterator) == []


def test_it_runs_no_further_ahead_than_told() -> None:
    source = Source(1000)
    iterator = BackgroundIterator(source, 3, "under test")
    assert [next(iterator) for _ in range(5)] == [1, 2, 3, 4, 5]
    time.sleep(0.2)
    assert source.made <= 5 + 3 + 1
    iterator.close()
    assert source.closed and not running()


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt("stop"), MemoryError("full")])
def test_an_error_comes_after_the_items_before_it(error: BaseException) -> None:
    iterator = BackgroundIterator(Source(4, error), 2, "under test")
    assert [next(iterator) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(type(error)) as raised:
        next(iterator)
    assert raised.value is error
    assert not running()
    assert list(iterator) == []


def test_an_abandoned_iterator_ends_its_thread() -> None:
    source = Source(1000)
    iterator = BackgroundIterator(source, 2, "under test")
    next(iterator)
    del iterator
    gc.collect()
    assert ends() and source.closed


def test_close_wakes_a_thread_that_waits_for_the_next_item() -> None:
    release = threading.Event()

    def slow() -> Iterator[int]:
        release.wait(10)
        yield 1

    iterator = BackgroundIterator(slow(), 1, "under test")
    received: list[list[int]] = []
    waiting = threading.Thread(target=lambda: received.append(list(iterator)))
    waiting.start()
    closing = threading.Thread(target=iterator.close)
    closing.start()
    release.set()
    for thread in (waiting, closing):
        thread.join(10)
        assert not thread.is_alive()
    assert received in ([[]], [[1]]) and not running()
