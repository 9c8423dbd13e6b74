"""Streams and events, of an accelerator or of threads: PyTorch's own have no CPU implementation.

Everything that moves rows is written against these few calls, so that the same code runs, with real asynchrony, where
there is no accelerator, and under a simulated device in the tests.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work before it is finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits, in the calling thread, until the work before it is finished; raises the error that stopped it."""

    @abstractmethod
    def time(self) -> float:
        """When that was, once it is ``done``: seconds, as ``time.perf_counter`` counts them."""

    def since(self, earlier: Event) -> float:
        """Seconds from ``earlier``, an event of the same runtime, once both are ``done``."""
        return self.time() - earlier.time()


class Stream(ABC):
    """Work that runs in the order it was given."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Runs ``work``, or what it puts on the current stream, after all that was given to this stream before."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Lets the work that is given from now on wait for ``event``, of any stream."""

    @abstractmethod
    def record(self) -> Event:
        """The point that is reached when all that was given so far is finished."""

    def synchronize(self) -> None:
        """Waits until all that was given so far is finished."""
        self.record().synchronize()

    @abstractmethod
    def close(self) -> None:
        """Ends what the stream runs on; nothing may be given to it any more."""


class Runtime(ABC):
    """Where slots live, and what computes over them."""

    device: torch.device

    @property
    @abstractmethod
    def compute(self) -> Stream:
        """The stream that the calling thread computes on."""

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """A stream beside it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the work of all streams of compute, of any thread, is finished."""


class _Reached(Event):
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def time(self) -> float:
        return self._time


class _CallingThread(Stream):
    """Runs its work at once."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self) -> Event:
        return _Reached()

    def close(self) -> None:
        """Has nothing to end."""


_CALLING_THREAD = _CallingThread()


class _ThreadEvent(Event):
    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        self._error = error
        self._time = time.perf_counter()
        self._reached.set()

    def done(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def time(self) -> float:
        return self._time


class WorkerStream(Stream):
    """A thread that runs the work. After an error it does nothing more; whoever waits for it gets the error."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | _ThreadEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def wait(self, event: Event) -> None:
        if not event.done():
            self._queue.put(event.synchronize)

    def record(self) -> Event:
        event = _ThreadEvent()
        self._queue.put(event)
        return event

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def __del__(self) -> None:
        self._queue.put(None)  # the thread holds the queue alone, so that the stream can be collected


def _work(work: queue.SimpleQueue[Callable[[], None] | _ThreadEvent | None]) -> None:
    error: BaseException | None = None
    while (item := work.get()) is not None:
        if isinstance(item, _ThreadEvent):
            item.reach(error)
        elif error is None:
            try:
                item()
            except BaseException as raised:
                error = raised
        del item  # what it holds may be large


class HostRuntime(Runtime):
    """Slots in host memory; compute runs in the calling thread, streams beside it in threads of their own."""

    device = torch.device("cpu")

    @property
    def compute(self) -> Stream:
        return _CALLING_THREAD

    def new_stream(self, name: str) -> Stream:
        return WorkerStream(name)

    def synchronize(self) -> None:
        """Returns at once: what threads have computed is done."""


class _Clock:
    """A moment that is known both as an event of the device and as a time of the host."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.accelerator.current_stream(device).record_event(torch.Event(device, enable_timing=True))
        self.event.synchronize()
        self.time = time.perf_counter()


class _DeviceEvent(Event):
    def __init__(self, event: torch.Event, clock: _Clock) -> None:
        self.event = event
        self._clock = clock

    def done(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def time(self) -> float:
        return self._clock.time + self._clock.event.elapsed_time(self.event) / 1e3

    def since(self, earlier: Event) -> float:
        """As ``Event.since``; not from times, whose resolution falls as a run goes on."""
        assert isinstance(earlier, _DeviceEvent)
        return earlier.event.elapsed_time(self.event) / 1e3


class _DeviceStream(Stream):
    def __init__(self, stream: torch.Stream, clock: _Clock) -> None:
        self._stream = stream
        self._clock = clock

    def run(self, work: Callable[[], None]) -> None:
        with self._stream:
            work()

    def wait(self, event: Event) -> None:
        if isinstance(event, _DeviceEvent):
            self._stream.wait_event(event.event)
        else:
            event.synchronize()

    def record(self) -> Event:
        event = torch.Event(self._stream.device, enable_timing=True)
        return _DeviceEvent(self._stream.record_event(event), self._clock)

    def close(self) -> None:
        """Leaves the stream to PyTorch, which keeps streams for reuse."""


class DeviceRuntime(Runtime):
    """Slots on an accelerator, of any kind that PyTorch has streams for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = _Clock(device)

    @property
    def compute(self) -> Stream:
        return _DeviceStream(torch.accelerator.current_stream(self.device), self._clock)

    def new_stream(self, name: str) -> Stream:
        return _DeviceStream(torch.Stream(self.device), self._clock)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


def runtime_for(device: torch.device) -> Runtime:
    """The runtime of a device.

    Raises:
        ValueError: this machine has no such device.
    """
    if device.type == "cpu":
        return HostRuntime()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        there = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise ValueError(f"device {device}: PyTorch finds {there} here; take cpu, or a PyTorch built for {device.type}")
    return DeviceRuntime(device)
