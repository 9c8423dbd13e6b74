"""What the bus between host and device can do: large copies of pinned memory, one way, the other, and both at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys_offload.embedding.host_memory import allocate, is_registered
from recsys_offload.embedding.runtime import Runtime, Stream

TO_DEVICE, TO_HOST, BOTH = "host to device", "device to host", "both at once"
REPEATS = 8


class _Copy(NamedTuple):
    """Copies from one place to another, in a stream."""

    stream: Stream
    source: Tensor
    target: Tensor

    def run(self) -> None:
        self.target.copy_(self.source, non_blocking=True)


def _bytes_per_second(copies: list[_Copy]) -> float:
    """Of all copies together, from the beginning of the first to the end of the last, timed by the streams' events."""
    starts, ends = [], []
    for copy in copies:
        stream = copy.stream
        starts.append(stream.record())
        for _ in range(REPEATS):
            stream.run(copy.run)
        ends.append(stream.record())
    for end in ends:
        end.synchronize()
    seconds = max(end.time() for end in ends) - min(start.time() for start in starts)
    return REPEATS * sum(one.source.nbytes for one in copies) / seconds


def measure_bus(runtime: Runtime, copy_bytes: int) -> dict[str, float]:
    """Bytes per second of pinned copies in each direction and in both, and from memory registered as tables are.

    Args:
        runtime: of the device.
        copy_bytes: of one copy.
    """
    device, on_gpu = runtime.device, runtime.device.type != "cpu"
    elements = copy_bytes // 4
    sent, received = (torch.ones(elements, pin_memory=on_gpu) for _ in range(2))
    arrived, leaving = (torch.ones(elements, device=device) for _ in range(2))
    sending, receiving = runtime.new_stream("to the device"), runtime.new_stream("to the host")
    to_device, to_host = _Copy(sending, sent, arrived), _Copy(receiving, leaving, received)
    runtime.synchronize()
    ways = {TO_DEVICE: [to_device], TO_HOST: [to_host], BOTH: [to_device, to_host]}
    own = allocate((elements,), np.dtype(np.float32), "the source of a copy", pin=on_gpu)
    own.fill(1.0)
    if is_registered(own) or not on_gpu:
        ways[f"{TO_DEVICE}, from a table's memory"] = [_Copy(sending, torch.from_numpy(own), arrived)]
    try:
        for copies in ways.values():
            _bytes_per_second(copies)  # the first copies are slower
        return {name: _bytes_per_second(copies) for name, copies in ways.items()}
    finally:
        sending.close()
        receiving.close()
