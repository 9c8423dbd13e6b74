"""An iterator that runs ahead on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _End:
    """The last thing in the queue: the iterator ended, with an error or without."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class BackgroundIterator(Generic[Item]):
    """Runs an iterator on a thread, at most ``depth`` items ahead of its consumer.

    An error of the iterator is raised at the consumer, after the items before it. ``close`` ends the thread and the
    iterator; so does the garbage collector. A closed iterator yields nothing more.
    """

    def __init__(self, source: Iterator[Item], depth: int, name: str) -> None:
        """Args:
        source: a generator, or another iterator with ``close``; nobody else may use it.
        depth: how many items may wait.
        name: of the thread.
        """
        self._queue: queue.Queue[Item | _End] = queue.Queue(depth)
        self._stop = threading.Event()
        # The thread holds no reference to this object, so that the collector can find it.
        self._thread = threading.Thread(target=_run, args=(source, self._queue, self._stop), name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _End):
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.02)
            except queue.Empty:
                continue
        self._thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(_End(None))  # for a thread that waits for the next item

    def __del__(self) -> None:
        self._stop.set()


def _run(source: Iterator[Item], target: queue.Queue[Item | _End], stop: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            if not _put(item, target, stop):
                break
            del item  # or it would stay in memory while the next one is made
    except BaseException as raised:  # handed to the consumer, whatever it is
        error = raised
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
        _put(_End(error), target, stop)


def _put(item: Item | _End, target: queue.Queue[Item | _End], stop: threading.Event) -> bool:
    """Waits for room; False where the consumer has gone."""
    while not stop.is_set():
        try:
            target.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
