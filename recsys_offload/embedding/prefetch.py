"""The look-ahead pipeline: batches are planned, and their rows moved, ahead of the training loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding.cache import do_nothing, most_batches_ahead
from recsys_offload.embedding.collection import HostCollection
from recsys_offload.embedding.modules import host_collections
from recsys_offload.embedding.request import Request
from recsys_offload.embedding.statistics import CacheCounts

BatchT = TypeVar("BatchT")

# How long the threads wait before they look again for a batch that the garbage collector has finished.
PATIENCE_SECONDS = 0.05


def find_ids(batch: Any) -> list[KeyedJaggedTensor]:
    """The ``KeyedJaggedTensor``s in a batch: itself, or in its fields, entries or items, at any depth."""
    if isinstance(batch, KeyedJaggedTensor):
        return [batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, one.name) for one in fields(batch)]
    elif isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        parts = list(batch)
    else:
        return []
    return [found for part in parts for found in find_ids(part)]


@dataclass
class _Item(Generic[BatchT]):
    """A batch on its way: its plans at every collection, and where the loader stood behind it."""

    batch: BatchT
    requests: list[tuple[HostCollection, Request]]
    position: Any
    admitted: int = 0


class Prefetcher(Generic[BatchT]):
    """Iterates over a loader's batches, which are looked at ahead of time; made by ``prefetch``.

    Each ``for`` loop iterates over the loader anew. A loader with ``state_dict`` and ``load_state_dict`` keeps its
    meaning: ``state_dict`` here is the position behind the last batch handed out, however far was read ahead, and a
    loop that is left early sets the loader back to there.
    """

    def __init__(self, loader: Iterable[BatchT], model: nn.Module, depth: int) -> None:
        if depth < 0:
            raise ValueError(f"depth must be at least 0, not {depth}")
        self._loader = loader
        self._collections = list(host_collections(model).values())
        self._depth = depth
        self._running: _Pipeline[BatchT] | None = None
        self._position: Any = None

    def __iter__(self) -> Iterator[BatchT]:
        self.close()
        self._position = _position(self._loader)
        running = _Pipeline(self._loader, self._collections, self._depth)
        self._running = running
        try:
            while (item := running.next()) is not None:
                self._position = item.position
                try:
                    yield item.batch
                finally:
                    running.finish(item)
                del item  # the memory of its batch may be needed for the next
            self._position = None
        finally:
            # Also where the loop is left early, by an error or a break: no thread outlives it.
            running.close()
            self._set_loader_back()
            if self._running is running:
                self._running = None

    def _set_loader_back(self) -> None:
        if self._position is not None:
            self._loader.load_state_dict(self._position)  # type: ignore[attr-defined]
            self._position = None

    def close(self) -> None:
        """Ends a loop that is under way, and its threads."""
        if self._running is not None:
            self._running.close()
            self._running = None
            self._set_loader_back()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def state_dict(self) -> Any:
        """The loader's state behind the last batch that was handed out.

        Raises:
            AttributeError: the loader has no ``state_dict``.
        """
        return self._loader.state_dict() if self._position is None else self._position  # type: ignore[attr-defined]

    def counts(self) -> CacheCounts:
        """What the caches of all collections of the model did so far."""
        total = CacheCounts()
        for collection in self._collections:
            total = total.plus(collection.statistics.counts())
        return total

    def queue_depths(self) -> dict[str, int]:
        """Batches that are planned but have no slots yet, and batches that wait for the loop."""
        running = self._running
        return {"planned": 0, "ready": 0} if running is None else running.depths()


def prefetch(loader: Iterable[BatchT], model: nn.Module, depth: int = 4) -> Prefetcher[BatchT]:
    """Looks after the rows of coming batches while the present one is trained on.

    The training loop stays as it is: ``for batch in prefetch(loader, model): ...``. The ``KeyedJaggedTensor``s of a
    batch are found by themselves and planned for every collection of the model that reads their keys, if it is in
    training mode. A forward pass with any other tensor works as well; it waits for its rows. An id that its table has
    no row for is reported by the forward pass of its batch, as without ``prefetch``.

    Args:
        loader: any iterable of batches; iterated over in a thread of its own.
        model: whose collections (``host_collections``) are to find their rows on the device.
        depth: batches that are known ahead of the one in training. With 0 nothing happens ahead, and no thread runs.

    Raises:
        ValueError: ``depth`` is negative.
    """
    return Prefetcher(loader, model, depth)


def _position(loader: Iterable[Any]) -> Any:
    """Where a loader stands; None for one that cannot be set back."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader.state_dict()
    return None


class _Pipeline(Generic[BatchT]):
    """One loop's threads: one reads and plans batches, one has their rows moved. The loop takes what is ready."""

    def __init__(self, loader: Iterable[BatchT], collections: list[HostCollection], depth: int) -> None:
        self._loader = loader
        self._source = iter(loader)
        self._collections = [collection for collection in collections if collection.training]
        self._depth = depth
        self._changed = threading.Condition()
        self._changes = 0
        self._planned: deque[_Item[BatchT]] = deque()
        self._ready: deque[_Item[BatchT]] = deque()
        self._ended = self._closed = self._starving = False
        self._error: BaseException | None = None
        self._threads = []
        if depth > 0:
            for collection in self._collections:
                if collection.cache is not None:
                    collection.cache.on_finish = self._notify
            targets = {"plan ahead": self._plan_ahead, "move ahead": self._admit_ahead}
            self._threads = [
                threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
                for name, target in targets.items()
            ]
            for thread in self._threads:
                thread.start()

    def _notify(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def depths(self) -> dict[str, int]:
        with self._changed:
            return {"planned": len(self._planned), "ready": len(self._ready)}

    def next(self) -> _Item[BatchT] | None:
        """The next batch, its rows in their slots or on their way there; None at the end."""
        if self._depth == 0:
            item = None if self._closed else self._read()
            if item is not None:
                try:
                    self._admit(item, [], may_grow=True)
                except BaseException:
                    self.finish(item)
                    raise
            return item
        start = time.perf_counter()
        with self._changed:
            had_planned = bool(self._planned)
            while not self._ready:
                if self._error is not None and not self._planned:
                    raise self._error
                if self._closed or (self._ended and not self._planned):
                    return None
                self._starving = True
                self._notify()
                self._changed.wait()
            self._starving = False
            item = self._ready.popleft()
            self._notify()
        self._note_wait(start, had_planned)
        return item

    def _note_wait(self, start: float, for_rows: bool) -> None:
        end = time.perf_counter()
        if self._collections:
            statistics = self._collections[0].statistics
            statistics.add(**{"stalled_seconds" if for_rows else "waiting_seconds": end - start})
            statistics.span("training", "wait for slots" if for_rows else "wait for the loader", start, end)

    def finish(self, item: _Item[BatchT]) -> None:
        """Releases what the batch held and did not use."""
        for collection, request in item.requests:
            collection.give_up(request)

    def close(self) -> None:
        """Ends the threads, waits for them, and releases what they held."""
        with self._changed:
            self._closed = True
            self._notify()
        close_source = getattr(self._source, "close", None)
        for thread in self._threads:
            thread.join()
        if close_source is not None:
            close_source()
        for collection in self._collections:
            if collection.cache is not None:
                collection.cache.on_finish = do_nothing
        self._planned.extend(self._ready)
        self._ready.clear()
        self._drop_planned()

    def _guarded(self, target: Callable[[], None]) -> None:
        """Runs a thread; its error is raised in the loop, after the batches that still can be trained on."""
        try:
            target()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                if target == self._admit_ahead:
                    self._drop_planned()  # nobody else would have their rows moved
                self._notify()

    def _read(self) -> _Item[BatchT] | None:
        """Reads and plans the next batch."""
        try:
            batch = next(self._source)
        except StopIteration:
            return None
        return _Item(batch, self._plan(batch), _position(self._loader))

    def _plan(self, batch: BatchT) -> list[tuple[HostCollection, Request]]:
        requests: list[tuple[HostCollection, Request]] = []
        start = time.perf_counter()
        try:
            for features in find_ids(batch):
                for collection in self._collections:
                    if collection.reads(features):
                        requests.append((collection, collection.plan(features)))
        except ValueError:
            # Its ids are wrong. The batch is handed out as it is: its forward pass raises the same error again, where
            # the loop knows which batch it was.
            for collection, request in requests:
                collection.give_up(request)
            return []
        if requests:
            requests[0][0].statistics.span("plan ahead", "plan", start, time.perf_counter())
        return requests

    def _plan_ahead(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and len(self._planned) + len(self._ready) >= self._depth:
                    self._changed.wait()
                if self._stopping:
                    return
            item = self._read()
            with self._changed:
                if item is None:
                    self._ended = True
                elif self._stopping:
                    self.finish(item)
                else:
                    self._planned.append(item)
                self._notify()
            if item is None:
                return
            del item

    @property
    def _stopping(self) -> bool:
        """Whether no more batches are wanted: the loop was left, or a thread has failed."""
        return self._closed or self._error is not None

    def _admit(self, item: _Item[BatchT], coming: list[_Item[BatchT]], *, may_grow: bool) -> bool:
        """Has the rows of a batch moved; False where that has to be tried again."""
        for index in range(item.admitted, len(item.requests)):
            collection, request = item.requests[index]
            later = [other.requests[index][1] for other in coming if len(other.requests) == len(item.requests)]
            if not collection.admit(request, later, may_grow=may_grow):
                return False
            item.admitted = index + 1
        return True

    def _admit_ahead(self) -> None:
        batches_ahead = most_batches_ahead(self._depth)
        while True:
            with self._changed:
                while not self._closed and not self._planned:
                    if self._ended or self._error is not None:
                        return
                    self._changed.wait()
                if self._closed:
                    return
                item, *coming = self._planned
                must, changes = self._starving and not self._ready, self._changes
            if must or all(collection.has_room_ahead(request, batches_ahead) for collection, request in item.requests):
                admitted = self._admit(item, coming, may_grow=must)
            else:
                admitted = False
            with self._changed:
                if admitted:
                    self._ready.append(self._planned.popleft())
                    self._notify()
                elif self._changes == changes:
                    self._changed.wait(PATIENCE_SECONDS)
            del item, coming

    def _drop_planned(self) -> None:
        with self._changed:
            dropped = list(self._planned)
            self._planned.clear()
        for item in dropped:
            self.finish(item)
