"""The gradient of a lookup's output, read where it lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


def with_contiguous_rows(matrix: Tensor) -> Tensor:
    """``matrix`` itself, or a copy where its rows are not contiguous float32; they may lie apart."""
    matrix = matrix.float()
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


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
        matrix = with_contiguous_rows(matrix)
        rows, columns = matrix.shape
        size = (rows - 1) * matrix.stride(0) + columns if rows else 0
        return cls(matrix.as_strided((size,), (1,)).numpy(), matrix.stride(0))
