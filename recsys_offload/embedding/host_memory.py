"""Host memory for tables: one mapping of our own, in huge pages where allowed, pinned where a device is there."""

from __future__ import annotations

import logging
import mmap
import weakref
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

# Address of every array that the device can reach, while it lives.
_registered: set[int] = set()


def available_bytes() -> int:
    """What the kernel says can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")


def allocate(shape: tuple[int, ...], dtype: np.dtype, purpose: str, pin: bool = False) -> np.ndarray:
    """A zeroed array in a private mapping of its own, given back when the last view of it is gone.

    torch's host allocator rounds a pinned block up to a power of two, and the C allocator never uses huge pages on
    its own; a mapping of ours has the exact size and may have both.

    Args:
        shape: of the array.
        dtype: of the array.
        purpose: what it is for, for the error message.
        pin: register it with the device, so that copies run at the bus's speed and asynchronously. Where that cannot be
            done there is a warning, and the array is not pinned (``is_registered``).

    Raises:
        MemoryError: the machine has too little memory left.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    available = available_bytes()
    if size > available:
        raise MemoryError(
            f"{purpose} needs {size / 2**30:.2f} GiB of host memory, but only {available / 2**30:.2f} GiB is "
            "available. Use fewer or smaller tables, or an optimizer with less state (rowwise_adagrad, sgd)."
        )
    if size == 0:
        return np.empty(shape, dtype)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, dtype).reshape(shape)
    if pin:
        _register(array)
    return array


def is_registered(array: np.ndarray) -> bool:
    """Whether an array from ``allocate`` is pinned, so that kernels on the device can read and write it."""
    return array.ctypes.data in _registered


def _register(array: np.ndarray) -> None:
    """Pins the pages of ``array`` until its memory is given back; says what it costs where that cannot be done."""
    address = array.ctypes.data
    try:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, array.nbytes, 0))
    except (AssertionError, RuntimeError) as error:  # no CUDA; or a limit of locked memory, as in some containers
        logger.warning(
            "%.2f GiB of host memory could not be pinned (%s). Training goes on: rows are copied at about half the "
            "bus's speed, not beside the compute, and zero copy is not possible. Raise the limit of locked memory "
            "(ulimit -l), or keep more of the tables on the device (embedding.cache.size).",
            array.nbytes / 2**30,
            str(error).splitlines()[0],
        )
        return
    _registered.add(address)
    weakref.finalize(array.base, _unregister, address)


def _unregister(address: int) -> None:
    _registered.discard(address)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
