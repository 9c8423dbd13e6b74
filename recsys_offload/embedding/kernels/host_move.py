"""A Numba kernel that moves rows between host tables and slots in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.numba_support import FLOATS_PER_LINE, kernel, prefetch, prefetch_write

ROWS_AHEAD = 12


@kernel
def copy_rows(source: Any, source_rows: Any, target: Any, target_rows: Any, columns: int) -> None:
    """Copies the first ``columns`` of row ``source_rows[i]`` to row ``target_rows[i]``, for every i.

    Args:
        source: float32 ``[R, W]`` and
        target: float32 ``[S, V]``, contiguous.
        source_rows: ``[n]`` and
        target_rows: ``[n]``, integers.
    """
    count = source_rows.shape[0]
    for index in range(count):
        if index + ROWS_AHEAD < count:
            ahead = np.int64(source_rows[index + ROWS_AHEAD]) * source.shape[1]
            into = np.int64(target_rows[index + ROWS_AHEAD]) * target.shape[1]
            for column in range(0, columns, FLOATS_PER_LINE):
                prefetch(source, ahead + column)
                prefetch_write(target, into + column)
        for column in range(columns):
            target[target_rows[index], column] = source[source_rows[index], column]
