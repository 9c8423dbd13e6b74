"""The matrices that lookups write and backward passes read: reused memory, and rows that lie apart."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recsys_offload.embedding.host_memory import allocate

# Buffers kept for the next batch: one may still be read while another is written.
KEPT_BUFFERS = 2


@dataclass(frozen=True)
class RowMajor:
    """A float32 matrix whose rows are contiguous, but may lie apart: a slice of a larger one is read where it is.

    Attributes:
        flat: from the first element on, float32 ``[(rows - 1) * row_stride + columns]``.
        row_stride: elements from one row to the next.
    """

    flat: np.ndarray
    row_stride: int

    @classmethod
    def of(cls, matrix: Tensor) -> RowMajor:
        """A view of ``matrix`` ``[rows, columns]``, or of a copy where its rows are not contiguous float32."""
        matrix = matrix.float()
        if matrix.stride(1) != 1:
            matrix = matrix.contiguous()
        rows, columns = matrix.shape
        size = (rows - 1) * matrix.stride(0) + columns if rows else 0
        return cls(matrix.as_strided((size,), (1,)).numpy(), matrix.stride(0))


class OutputBuffers:
    """Memory for the output of lookups, used again once nobody holds the tensor that was made of it.

    A fresh matrix of this size costs a page fault for every 4 KiB, which takes about as long as the lookup.
    """

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._users: list[weakref.ref[np.ndarray] | None] = []

    def take(self, rows: int, columns: int) -> Tensor:
        """An uninitialised float32 tensor ``[rows, columns]``."""
        size = rows * columns
        for index, user in enumerate(self._users):
            if (user is None or user() is None) and len(self._buffers[index]) >= size:
                return self._lend(index, rows, columns)
        free = [index for index, user in enumerate(self._users) if user is None or user() is None]
        if free:
            del self._buffers[free[0]], self._users[free[0]]
        elif len(self._buffers) >= KEPT_BUFFERS:
            return torch.empty(rows, columns)
        self._buffers.append(allocate((size,), np.dtype(np.float32), f"the output of a lookup, [{rows}, {columns}]"))
        self._users.append(None)
        return self._lend(len(self._buffers) - 1, rows, columns)

    def _lend(self, index: int, rows: int, columns: int) -> Tensor:
        # The tensor's storage holds on to this very view, so the view lives as long as the storage does.
        view = self._buffers[index][: rows * columns].reshape(rows, columns)
        self._users[index] = weakref.ref(view)
        return torch.from_numpy(view)
