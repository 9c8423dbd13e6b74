"""A Numba kernel that fills tables with uniform random values, the same for any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.numba_support import kernel
from recsys_offload.splitmix64 import GOLDEN_GAMMA, mix


@kernel
def fill_uniform(first_row: int, last_row: int, rows: Any, dim: int, seed: np.uint64, low: float, high: float) -> None:
    """Fills the first ``dim`` columns of rows ``[first_row, last_row)`` with values from ``[low, high)``.

    Element n of the table (row-major) takes output n of SplitMix64 (Steele, Lea and Flood, 2014) seeded by ``seed``:
    a generator that can start anywhere, so any thread may fill any rows.
    """
    scale = np.float32(high) - np.float32(low)
    for row in range(first_row, last_row):
        for column in range(dim):
            bits = mix(seed + np.uint64(row * dim + column + 1) * GOLDEN_GAMMA)
            unit = np.float32(bits >> np.uint64(40)) * np.float32(2.0**-24)
            rows[row, column] = np.float32(low) + unit * scale
