"""The output function of SplitMix64 (Steele, Lea and Flood, 2014), for hashes and for random numbers by position."""

from __future__ import annotations

import numba
import numpy as np

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@numba.njit(nogil=True, cache=True)
def mix(bits: np.uint64) -> np.uint64:
    """Scrambles 64 bits, one to one."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIER_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIER_2
    return bits ^ (bits >> np.uint64(31))
