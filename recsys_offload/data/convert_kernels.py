"""Numba kernels that turn decoded columns into the model's input. All release the GIL."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

IDENTITY, LOG1P, STANDARDIZE = range(3)
# log(1 + n) for the small counts that fill most click logs: a table look-up costs a tenth of the logarithm.
LOG1P_TABLE = np.log1p(np.arange(4096, dtype=np.float64))


@numba.njit(nogil=True, cache=True)
def copy_dense_column(values: Any, output: Any) -> bool:
    """Writes a column as it is, float32; False if a value is not finite."""
    finite = True
    for row in range(len(output)):
        result = np.float32(values[row])
        output[row] = result
        finite &= result - result == np.float32(0)
    return finite


@numba.njit(nogil=True, cache=True, error_model="numpy")
def fill_dense_column(
    values: Any,
    validity: Any,
    first_bit: int,
    transform: int,
    mean: float,
    scale: float,
    fill: float,
    log1p_table: Any,
    output: Any,
) -> int:
    """Writes a column, transformed, to ``output`` float32 ``[rows]``.

    ``validity`` is Arrow's bitmap from ``first_bit`` on, or empty. Returns -1, or the row of an infinite value.
    """
    for row in range(len(output)):
        if validity.shape[0] > 0:
            bit = first_bit + row
            if not (validity[bit >> 3] >> np.uint8(bit & 7)) & np.uint8(1):
                output[row] = np.float32(fill)
                continue
        value = np.float64(values[row])
        if value != value:
            output[row] = np.float32(fill)
            continue
        if transform == LOG1P:
            size = abs(value)
            tabled = size < log1p_table.shape[0] and size == math.floor(size)
            logarithm = log1p_table[np.int64(size)] if tabled else np.log1p(size)
            value = logarithm if value >= 0 else -logarithm
        elif transform == STANDARDIZE:
            value = (value - mean) * scale
        result = np.float32(value)
        if math.isinf(result):
            return row
        output[row] = result
    return -1


@numba.njit(nogil=True, cache=True)
def take(values: Any, order: Any, output: Any) -> None:
    """``output[i] = values[order[i]]`` for vectors."""
    for index in range(len(order)):
        output[index] = values[order[index]]


@numba.njit(nogil=True, cache=True)
def take_bags(values: Any, offsets: Any, order: Any, new_offsets: Any, output: Any) -> None:
    """Copies bag ``order[i]`` to bag i; ``new_offsets`` ``[bags + 1]`` says where it goes."""
    for index in range(len(order)):
        source, target = offsets[order[index]], new_offsets[index]
        for position in range(new_offsets[index + 1] - target):
            output[target + position] = values[source + position]
