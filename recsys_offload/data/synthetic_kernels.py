"""Random columns, each value a function of seed, column and row alone: so it does not matter who makes it, or when."""

from __future__ import annotations

import functools
import math

import numba
import numpy as np

from recsys_offload.splitmix64 import GOLDEN_GAMMA, mix

_kernel = functools.partial(numba.njit, nogil=True, cache=True, error_model="numpy")

_BELOW_53_BITS, _16_BITS, _MASK_16 = np.uint64(11), np.uint64(16), np.uint64(0xFFFF)
_UNIT = 2.0**-53
# Four uniform 16-bit numbers, summed: their mean, and the inverse of their standard deviation.
_SUM_MEAN, _SUM_SCALE = 2.0 * 65535.0, math.sqrt(3.0) / 65536.0


@_kernel
def _uniform(state: np.uint64) -> float:
    """A number in [0, 1) from one state of a SplitMix64 stream."""
    return np.float64(mix(state) >> _BELOW_53_BITS) * _UNIT


@_kernel
def _latent(key: np.uint64, identity: int) -> float:
    """A fixed, nearly normal number (mean 0, variance 1) for an id."""
    bits = mix(key + np.uint64(identity) * GOLDEN_GAMMA)
    total = np.float64(bits & _MASK_16)
    for _ in range(3):
        bits >>= _16_BITS
        total += np.float64(bits & _MASK_16)
    return (total - _SUM_MEAN) * _SUM_SCALE


@_kernel
def _integral(x: float, skew: float) -> float:
    """The integral of t^-skew from 1 to x."""
    power = (1.0 - skew) * math.log(x)
    return math.log(x) if abs(power) < 1e-12 else math.expm1(power) / (1.0 - skew)


@_kernel
def _inverse_integral(y: float, skew: float) -> float:
    """The x at which `_integral` is y."""
    product = (1.0 - skew) * y
    return math.exp(y) if abs(product) < 1e-12 else math.exp(math.log1p(product) / (1.0 - skew))


@_kernel
def zipf_constants(size: int, skew: float) -> tuple[float, float, float]:
    """What `zipf_rank` needs: the bounds of the area that is drawn from, and the width of the sure acceptance."""
    low = _integral(1.5, skew) - 1.0
    high = _integral(size + 0.5, skew)
    sure = 2.0 - _inverse_integral(_integral(2.5, skew) - 2.0**-skew, skew)
    return low, high, sure


@_kernel
def zipf_rank(state: np.uint64, size: int, skew: float, low: float, high: float, sure: float) -> tuple[int, np.uint64]:
    """A rank in 1..size with probability proportional to rank^-skew, exactly, and the next state.

    Rejection-inversion (Hörmann and Derflinger 1996): invert the integral, round, and correct what rounding adds by
    a rejection that happens rarely. Constant time for every size.
    """
    while True:
        state += GOLDEN_GAMMA
        area = high + _uniform(state) * (low - high)
        x = _inverse_integral(area, skew)
        rank = min(max(int(x + 0.5), 1), size)
        if rank - x <= sure or area >= _integral(rank + 0.5, skew) - math.exp(-skew * math.log(rank)):
            return rank, state


@_kernel
def fill_ids(
    key: np.uint64, first_row: int, rows: int, size: int, hotness: int, skew: float, null_rate: float,
    multiplier: int, offset: int, ids: np.ndarray, is_null: np.ndarray, effect: np.ndarray, factor: np.ndarray,
) -> int:  # fmt: skip
    """Draws one categorical column.

    Args:
        key: of the seed and the column.
        first_row: the number of the first row.
        rows: how many rows.
        size: distinct ids.
        hotness: ids per row.
        skew: the Zipf exponent, at least 0.
        null_rate: the share of rows that have no ids.
        multiplier: and offset: the id of rank r is (r * multiplier + offset) mod size.
        ids: int32 ``[rows * hotness]``, written: the ids without gaps; where hotness is 1, one a row, 0 for a null.
        is_null: bool ``[rows]``, written.
        effect: float32 ``[rows]``, written: the sum of the ids' latent effects over the root of their number.
        factor: float32 ``[rows]``, written: the same of a second, independent latent.

    Returns:
        how many ids were written.
    """
    low, high, sure = zipf_constants(size, skew)
    effect_key, factor_key = mix(key ^ np.uint64(1)), mix(key ^ np.uint64(2))
    scale = 1.0 / math.sqrt(hotness)
    written = 0
    for index in range(rows):
        state = mix(key + np.uint64(first_row + index) * GOLDEN_GAMMA)
        is_null[index] = _uniform(state) < null_rate
        effect_sum, factor_sum = 0.0, 0.0
        if is_null[index]:
            if hotness == 1:
                ids[written] = 0
                written += 1
        else:
            for _ in range(hotness):
                rank, state = zipf_rank(state, size, skew, low, high, sure)
                identity = ((rank - 1) * multiplier + offset) % size
                ids[written] = identity
                written += 1
                effect_sum += _latent(effect_key, identity)
                factor_sum += _latent(factor_key, identity)
        effect[index] = effect_sum * scale
        factor[index] = factor_sum * scale
    return written


@_kernel
def fill_counts(
    key: np.uint64, first_row: int, location: float, spread: float, null_rate: float,
    counts: np.ndarray, is_null: np.ndarray, effect: np.ndarray,
) -> None:  # fmt: skip
    """Draws one dense column: whole numbers, log-normal before they are rounded down.

    Args:
        key: of the seed and the column.
        first_row: the number of the first row.
        location: and spread: the mean and the standard deviation of the logarithm.
        null_rate: the share of nulls.
        counts: int32 ``[rows]``, written.
        is_null: bool ``[rows]``, written.
        effect: float32 ``[rows]``, written: log(1 + count), less its location, over its spread; 0 for a null.
    """
    largest = math.log(2.0**31 - 1.0)
    for index in range(len(counts)):
        state = mix(key + np.uint64(first_row + index) * GOLDEN_GAMMA)
        is_null[index] = _uniform(state) < null_rate
        radius = math.sqrt(-2.0 * math.log(1.0 - _uniform(state + GOLDEN_GAMMA)))
        normal = radius * math.cos(2.0 * math.pi * _uniform(state + GOLDEN_GAMMA + GOLDEN_GAMMA))
        counts[index] = int(math.exp(min(location + spread * normal, largest)))
        effect[index] = 0.0 if is_null[index] else (math.log1p(float(counts[index])) - location) / spread


@_kernel
def draw_labels(
    key: np.uint64, first_row: int, logit: np.ndarray, intercept: float, probability: np.ndarray, labels: np.ndarray
) -> None:
    """Draws clicks.

    Args:
        key: of the seed and the label.
        first_row: the number of the first row.
        logit: float64 ``[rows]``: the log-odds of a click, less the intercept.
        intercept: added to all of them.
        probability: float64 ``[rows]``, written: of a click.
        labels: int8 ``[rows]``, written: 1 with this probability, else 0.
    """
    for index in range(len(labels)):
        probability[index] = 1.0 / (1.0 + math.exp(-(logit[index] + intercept)))
        labels[index] = _uniform(mix(key + np.uint64(first_row + index) * GOLDEN_GAMMA)) < probability[index]
