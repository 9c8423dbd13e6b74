"""A device whose work runs late: every stream, the compute stream too, is a thread that lags behind by random times.

What a missing wait would break on an accelerator, it breaks here, without one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys_offload.embedding import HostCollection, build_cache
from recsys_offload.embedding.cache import DeviceCache
from recsys_offload.embedding.request import Request
from recsys_offload.embedding.runtime import Event, Runtime, Stream, WorkerStream
from recsys_offload.embedding.slots import Slots

LONGEST_DELAY = 0.003


class LateStream(WorkerStream):
    """Waits a random while before each piece of work; may be told to ignore the events it should wait for."""

    def __init__(self, name: str, chance: random.Random, ignores_waits: bool) -> None:
        super().__init__(name)
        self._chance = chance
        self._ignores_waits = ignores_waits

    def run(self, work: Callable[[], None]) -> None:
        delay = self._chance.random() * LONGEST_DELAY

        def late() -> None:
            time.sleep(delay)
            with torch.no_grad():  # which belongs to a thread
                work()

        super().run(late)

    def wait(self, event: Event) -> None:
        if not self._ignores_waits:
            super().wait(event)


class LateRuntime(Runtime):
    """Slots in host memory, computed over by a thread that the training loop does not wait for."""

    device = torch.device("cpu")

    def __init__(self, seed: int, ignoring: frozenset[str]) -> None:
        """Args:
        seed: of the delays.
        ignoring: names of streams that ignore the events they should wait for.
        """
        self._chance = random.Random(seed)
        self._ignoring = ignoring
        self._compute = self.new_stream("compute")

    @property
    def compute(self) -> Stream:
        return self._compute

    def new_stream(self, name: str) -> Stream:
        return LateStream(name, self._chance, name in self._ignoring)

    def synchronize(self) -> None:
        self._compute.synchronize()


def simulate_device(patch: pytest.MonkeyPatch, seed: int, ignoring: frozenset[str] = frozenset()) -> None:
    """Lets the caches that are built from now on be on such a device."""
    patch.setattr(build_cache, "runtime_for", lambda device: LateRuntime(seed, ignoring))
    read = HostCollection._read

    def read_and_wait(self: HostCollection, request: Request) -> list[Tensor]:
        result = read(self, request)
        # What takes the output next is no work of the device here.
        assert self.cache is not None
        self.cache.runtime.synchronize()
        return result

    assemble = DeviceCache.assemble

    def wait_and_assemble(self: DeviceCache, rows: Sequence[np.ndarray]) -> list[Slots]:
        self.runtime.synchronize()  # tensor operations of the caller are in the order of the compute stream
        return assemble(self, rows)

    patch.setattr(HostCollection, "_read", read_and_wait)
    patch.setattr(DeviceCache, "assemble", wait_and_assemble)
