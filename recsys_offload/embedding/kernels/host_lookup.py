"""Numba kernels that read host tables: pooled and unpooled lookup, and the gradient of per-id weights.

All tables of a group lie in one float32 array ``rows`` of shape ``[R, W]``: a row's weights in its first ``dim``
columns, its optimizer state behind them. Ids are the ``values`` and ``offsets`` of a KeyedJaggedTensor: bag
``key * batch_size + sample``, in feature-major order; ``features`` is described in layout.py.

Each kernel works on a range of samples that its caller chooses; whatever the ranges, results are the same to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.layout import (
    BASE,
    COLUMN,
    INVALID_FALLBACK,
    INVALID_MODULO,
    KEY,
    LANES,
    MEAN,
    SIZE,
)
from recsys_offload.embedding.kernels.numba_support import FLOATS_PER_LINE, kernel, prefetch

PREFETCH_DISTANCE = 32
BAGS_AHEAD = 48


@kernel
def valid_id(id_: int, size: int, policy: int, fallback: int) -> int:
    """The row that ``id_`` stands for, or -1 where that is an error."""
    if 0 <= id_ < size:
        return id_
    if policy == INVALID_MODULO:
        return id_ % size
    if policy == INVALID_FALLBACK:
        return fallback
    return -1


@kernel
def _prefetch_weights(rows: Any, row: int, dim: int) -> None:
    first = row * rows.shape[1]
    for column in range(0, dim, FLOATS_PER_LINE):
        prefetch(rows, first + column)
    prefetch(rows, first + dim - 1)


@kernel
def lookup_pooled(
    first_sample: int,
    last_sample: int,
    rows: Any,
    dim: int,
    features: Any,
    values: Any,
    offsets: Any,
    weights: Any,
    batch_size: int,
    policy: int,
    fallback: int,
    output: Any,
) -> int:
    """Pools the bags of samples ``[first_sample, last_sample)`` into ``output`` ``[B, D]``.

    A bag's rows are added in the order of its ids; a mean is that sum divided by their number; an empty bag gives
    zeros. ``weights`` is empty, or holds one factor per id. Returns -1, or the position of an invalid id.
    """
    weighted = weights.shape[0] > 0
    samples_ahead = 1 + BAGS_AHEAD // max(1, features.shape[0])
    # Sample by sample, so that the output is written from end to end; the rows, which lie anywhere, are prefetched.
    for sample in range(first_sample, last_sample):
        for feature in range(features.shape[0]):
            bag = features[feature, KEY] * batch_size + sample
            base, size = features[feature, BASE], features[feature, SIZE]
            if sample + samples_ahead < last_sample:
                for position in range(offsets[bag + samples_ahead], offsets[bag + samples_ahead + 1]):
                    ahead = values[position]
                    if 0 <= ahead < size:
                        _prefetch_weights(rows, base + ahead, dim)
            begin, end = offsets[bag], offsets[bag + 1]
            column = features[feature, COLUMN]
            target = output[sample, column : column + dim]
            if begin == end:
                target[:] = np.float32(0)
            for position in range(begin, end):
                id_ = valid_id(values[position], size, policy, fallback)
                if id_ < 0:
                    return position
                source = rows[base + id_]
                factor = weights[position] if weighted else np.float32(1)
                if position == begin:
                    for d in range(dim):
                        target[d] = source[d] * factor
                else:
                    for d in range(dim):
                        target[d] += source[d] * factor
            if features[feature, MEAN] and end - begin > 1:
                count = np.float32(end - begin)
                for d in range(dim):
                    target[d] = target[d] / count
    return -1


@kernel
def lookup_rows(
    first_sample: int,
    last_sample: int,
    rows: Any,
    dim: int,
    features: Any,
    feature_ids: Any,
    values: Any,
    offsets: Any,
    batch_size: int,
    policy: int,
    fallback: int,
    output: Any,
) -> int:
    """Copies the row of every id of samples ``[first_sample, last_sample)`` into ``output`` ``[ids, dim]``.

    Ids are numbered feature by feature: those of feature f start at ``feature_ids[f]``. Returns -1, or the position
    of an invalid id.
    """
    for feature in range(features.shape[0]):
        first_bag = features[feature, KEY] * batch_size
        base, size = features[feature, BASE], features[feature, SIZE]
        shift = feature_ids[feature] - offsets[first_bag]
        end = offsets[first_bag + last_sample]
        for position in range(offsets[first_bag + first_sample], end):
            if position + PREFETCH_DISTANCE < end:
                ahead = values[position + PREFETCH_DISTANCE]
                if 0 <= ahead < size:
                    _prefetch_weights(rows, base + ahead, dim)
            id_ = valid_id(values[position], size, policy, fallback)
            if id_ < 0:
                return position
            for d in range(dim):
                output[position + shift, d] = rows[base + id_, d]
    return -1


@kernel
def sum_lanes(lanes: Any) -> np.float32:
    """The LANES partial sums added pairwise: first with fourth next, then second next, then next."""
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@kernel
def weight_gradients(
    first_sample: int,
    last_sample: int,
    rows: Any,
    dim: int,
    features: Any,
    values: Any,
    offsets: Any,
    batch_size: int,
    policy: int,
    fallback: int,
    gradient: Any,
    row_stride: int,
    output: Any,
) -> None:
    """Adds to ``output[id]`` the dot product of the id's row with its bag's gradient, at ``sample * row_stride``."""
    lanes = np.empty(LANES, np.float32)
    for feature in range(features.shape[0]):
        first_bag = features[feature, KEY] * batch_size
        base, size, column = features[feature, BASE], features[feature, SIZE], features[feature, COLUMN]
        for sample in range(first_sample, last_sample):
            begin, end = offsets[first_bag + sample], offsets[first_bag + sample + 1]
            for position in range(begin, end):
                row = base + valid_id(values[position], size, policy, fallback)
                lanes[:] = np.float32(0)
                for d in range(dim):
                    lanes[d % LANES] += rows[row, d] * gradient[sample * row_stride + column + d]
                product = sum_lanes(lanes)
                if features[feature, MEAN]:
                    product = product / np.float32(end - begin)
                output[position] += product
