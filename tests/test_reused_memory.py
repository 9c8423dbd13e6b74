"""Memory is lent to one holder at a time."""

from __future__ import annotations

import numpy as np
import torch

from recsys_offload.reused_memory import ReusedMemory


def test_memory_is_used_again_only_when_its_tensor_is_gone() -> None:
    memory = ReusedMemory(np.float32, kept=2)
    first = torch.from_numpy(memory.take(3, 4))
    part = first[1:].view(-1)[2:]
    place = first.data_ptr()
    del first
    second = torch.from_numpy(memory.take(3, 4))
    assert second.data_ptr() != place, "a view of the first tensor is still there"
    del part
    assert torch.from_numpy(memory.take(2, 5)).data_ptr() == place


def test_more_than_is_kept_is_ordinary_memory() -> None:
    memory = ReusedMemory(np.int64, kept=2)
    held = [memory.take(10) for _ in range(5)]
    for number, array in enumerate(held):
        array[:] = number
    assert [array.tolist() for array in held] == [[number] * 10 for number in range(5)]


def test_a_larger_request_replaces_a_free_buffer() -> None:
    memory = ReusedMemory(np.int64, kept=1)
    memory.take(4)
    large = memory.take(1000)
    place = large.ctypes.data
    del large
    assert memory.take(1100).ctypes.data == place
    assert memory.take(0).shape == (0,)
