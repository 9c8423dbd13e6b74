"""Arrays whose memory is used again once nobody holds them any more.

A fresh array of a few megabytes costs a page fault for every 4 KiB of it, which can take as long as filling it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

# A buffer is made a little larger than asked for, so that the next one, of nearly the same size, fits as well.
HEADROOM = 1.25


class ReusedMemory:
    """Keeps a few buffers and lends them; a buffer comes back when the array that was lent is gone.

    Only the array itself is watched: hand it to ``torch.from_numpy`` as it is, whose tensor holds on to it, and not
    a slice or another view of it.
    """

    def __init__(self, dtype: type[np.generic], kept: int) -> None:
        """Args:
        dtype: of all arrays.
        kept: buffers at most; what is asked for beyond them is ordinary memory.
        """
        self._dtype = np.dtype(dtype)
        self._kept = kept
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, *shape: int) -> np.ndarray:
        """An uninitialised array of this shape."""
        size = int(np.prod(shape))
        free = [index for index, (_, lent) in enumerate(self._buffers) if lent() is None]
        fitting = [index for index in free if len(self._buffers[index][0]) >= size]
        if fitting:
            return self._lend(self._buffers.pop(fitting[0])[0], shape, size)
        if free:
            self._buffers.pop(free[0])
        if len(self._buffers) >= self._kept:
            return np.empty(shape, self._dtype)
        return self._lend(np.empty(int(size * HEADROOM), self._dtype), shape, size)

    def _lend(self, buffer: np.ndarray, shape: tuple[Any, ...], size: int) -> np.ndarray:
        array = buffer[:size].reshape(shape)
        self._buffers.append((buffer, weakref.ref(array)))
        return array
