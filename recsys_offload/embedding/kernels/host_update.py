"""Numba kernels for the backward pass over host tables: sum each row's gradients and update the row at once.

The gradient of a distinct row is the sum over its occurrences in batch order. A row with more than ``CHUNK``
occurrences is summed by chunks of ``CHUNK``, each from its first gradient on, and the chunks' sums are added in order;
any thread may sum any chunk ahead (``sum_chunks``), so that no thread is left alone with a hot row. Whatever the
threads, the result is the same to the bit. No operation is fused: every product is rounded before it is added.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.host_lookup import sum_lanes
from recsys_offload.embedding.kernels.layout import (
    ADAGRAD,
    EPS,
    LANES,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ROWWISE_ADAGRAD,
    SGD,
    STEP_SIZE,
    WEIGHT_DECAY,
)
from recsys_offload.embedding.kernels.numba_support import FLOATS_PER_LINE, kernel, prefetch, prefetch_write

ROWS_AHEAD = 16
GRADIENTS_AHEAD = 24


@kernel
def _sum_gradients(
    gradient: Any,
    row_stride: int,
    gradient_rows: Any,
    gradient_columns: Any,
    factors: Any,
    begin: int,
    end: int,
    fetch_end: int,
    dim: int,
    total: Any,
) -> None:
    """``total`` = the sum of occurrences ``[begin, end)``, each times its factor, in order.

    Occurrence i's gradient starts at element ``gradient_rows[i] * row_stride + gradient_columns[i]`` of ``gradient``.
    """
    scaled = factors.shape[0] > 0
    for index in range(begin, end):
        if index + GRADIENTS_AHEAD < fetch_end:
            following = index + GRADIENTS_AHEAD
            ahead = np.int64(gradient_rows[following]) * row_stride + gradient_columns[following]
            for column in range(0, dim, FLOATS_PER_LINE):
                prefetch(gradient, ahead + column)
        first = np.int64(gradient_rows[index]) * row_stride + gradient_columns[index]
        source = gradient[first : first + dim]
        if scaled:
            factor = factors[index]
            if index == begin:
                for d in range(dim):
                    total[d] = source[d] * factor
            else:
                for d in range(dim):
                    total[d] += source[d] * factor
        elif index == begin:
            for d in range(dim):
                total[d] = source[d]
        else:
            for d in range(dim):
                total[d] += source[d]


@kernel
def sum_chunks(
    first: int,
    last: int,
    gradient: Any,
    row_stride: int,
    gradient_rows: Any,
    gradient_columns: Any,
    factors: Any,
    chunk_begin: Any,
    chunk_end: Any,
    partial: Any,
) -> None:
    """Sums chunks ``[first, last)`` of the hot rows into ``partial`` ``[chunks, dim]``."""
    dim = partial.shape[1]
    for chunk in range(first, last):
        end = chunk_end[chunk]
        _sum_gradients(
            gradient,
            row_stride,
            gradient_rows,
            gradient_columns,
            factors,
            chunk_begin[chunk],
            end,
            end,
            dim,
            partial[chunk],
        )


@kernel
def _update_sgd(record: Any, total: Any, dim: int, parameters: Any) -> None:
    step_size = parameters[STEP_SIZE]
    for d in range(dim):
        record[d] -= step_size * total[d]


@kernel
def _update_adagrad(record: Any, total: Any, dim: int, parameters: Any) -> None:
    step_size, eps = parameters[STEP_SIZE], parameters[EPS]
    for d in range(dim):
        accumulated = record[dim + d] + total[d] * total[d]
        record[dim + d] = accumulated
        record[d] -= step_size * (total[d] / (np.sqrt(accumulated) + eps))


@kernel
def _update_rowwise_adagrad(record: Any, total: Any, dim: int, parameters: Any, lanes: Any) -> None:
    for lane in range(LANES):
        lanes[lane] = np.float32(0)
    whole = dim - dim % LANES
    for d in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += total[d + lane] * total[d + lane]
    for d in range(whole, dim):
        lanes[d - whole] += total[d] * total[d]
    accumulated = record[dim] + sum_lanes(lanes) / np.float32(dim)
    record[dim] = accumulated
    multiplier = parameters[STEP_SIZE] / (np.sqrt(accumulated) + parameters[EPS])
    for d in range(dim):
        record[d] -= multiplier * total[d]


@kernel
def _update_adam(record: Any, total: Any, dim: int, parameters: Any) -> None:
    step_size, eps = parameters[STEP_SIZE], parameters[EPS]
    rate1, rate2 = parameters[ONE_MINUS_BETA1], parameters[ONE_MINUS_BETA2]
    for d in range(dim):
        gradient = total[d]
        average = record[dim + d] + (gradient - record[dim + d]) * rate1
        square = record[2 * dim + d] + (gradient * gradient - record[2 * dim + d]) * rate2
        record[dim + d] = average
        record[2 * dim + d] = square
        record[d] -= step_size * (average / (np.sqrt(square) + eps))


@kernel
def update_rows(
    first: int,
    last: int,
    optimizer: int,
    parameters: Any,
    rows: Any,
    distinct: Any,
    starts: Any,
    gradient: Any,
    row_stride: int,
    gradient_rows: Any,
    gradient_columns: Any,
    factors: Any,
    hot: Any,
    hot_starts: Any,
    partial: Any,
    dim: int,
) -> None:
    """Sums the gradients of distinct rows ``[first, last)`` and applies the optimizer to each.

    ``hot`` lists the distinct rows, in order, whose chunks were summed ahead; the sums of ``hot[i]`` lie at
    ``partial[hot_starts[i] : hot_starts[i + 1]]``.
    """
    total = np.empty(dim, np.float32)
    lanes = np.empty(LANES, np.float32)
    width = rows.shape[1]
    weight_decay = parameters[WEIGHT_DECAY]
    next_hot = np.searchsorted(hot, first)
    fetch_end = starts[last]
    for index in range(first, min(first + ROWS_AHEAD, last)):
        for column in range(0, width, FLOATS_PER_LINE):
            prefetch_write(rows, distinct[index] * width + column)
    for index in range(first, last):
        if index + ROWS_AHEAD < last:
            ahead = distinct[index + ROWS_AHEAD] * width
            for column in range(0, width, FLOATS_PER_LINE):
                prefetch_write(rows, ahead + column)
            prefetch_write(rows, ahead + width - 1)
        if next_hot < hot.shape[0] and hot[next_hot] == index:
            for chunk in range(hot_starts[next_hot], hot_starts[next_hot + 1]):
                for d in range(dim):
                    total[d] = partial[chunk, d] if chunk == hot_starts[next_hot] else total[d] + partial[chunk, d]
            next_hot += 1
        else:
            _sum_gradients(
                gradient,
                row_stride,
                gradient_rows,
                gradient_columns,
                factors,
                starts[index],
                starts[index + 1],
                fetch_end,
                dim,
                total,
            )
        record = rows[distinct[index]]
        if weight_decay != np.float32(0):
            for d in range(dim):
                total[d] += weight_decay * record[d]
        if optimizer == SGD:
            _update_sgd(record, total, dim, parameters)
        elif optimizer == ADAGRAD:
            _update_adagrad(record, total, dim, parameters)
        elif optimizer == ROWWISE_ADAGRAD:
            _update_rowwise_adagrad(record, total, dim, parameters, lanes)
        else:
            _update_adam(record, total, dim, parameters)
