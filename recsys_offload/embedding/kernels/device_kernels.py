"""Triton kernels over slots on a device: what host_lookup.py and host_update.py compute, to the same bit.

Every sum runs in the host kernels' order, and no product is fused with a sum (``device.py`` launches them so);
nothing is sorted and no atomics are used, so a result does not depend on how programs are scheduled. Offsets into
rows, gradients and outputs are 64 bits wide. Importing this module raises ImportError where Triton is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from recsys_offload.embedding.kernels import layout

LANES = tl.constexpr(layout.LANES)
CHUNK = tl.constexpr(layout.CHUNK)
SGD = tl.constexpr(layout.SGD)
ADAGRAD = tl.constexpr(layout.ADAGRAD)
ROWWISE_ADAGRAD = tl.constexpr(layout.ROWWISE_ADAGRAD)

# Gradients that a program has under way at once.
UNROLL = tl.constexpr(8)


_interpreting = threading.Lock()


class _OneAtATime:
    """A kernel in Triton's interpreter, which replaces functions of ``triton.language`` while a kernel runs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            with _interpreting:
                self._kernel[grid](*arguments, **options)

        return launch


def _kernel(varying: list[str]) -> Callable[[Callable[..., None]], Any]:
    """Makes a kernel that is not compiled anew for other values or alignments of the ``varying`` arguments.

    They are numbers that change from batch to batch, and arrays packed behind one another.
    """

    def make(function: Callable[..., None]) -> Any:
        kernel = triton.jit(do_not_specialize=varying, do_not_specialize_on_alignment=varying)(function)
        return _OneAtATime(kernel) if triton.knobs.runtime.interpret else kernel

    return make


@triton.jit
def _sum_lanes(lanes: tl.tensor, count: tl.constexpr) -> tl.tensor:
    """``[count]``: the sums of ``lanes`` ``[count, LANES]``, added pairwise: first with fourth next, and so on.

    A sum of two does not depend on the order in which the reduction takes them.
    """
    quarters = tl.sum(tl.reshape(lanes, [count, 2, LANES // 2]), axis=1)
    halves = tl.sum(tl.reshape(quarters, [count, 2, LANES // 4]), axis=1)
    return tl.sum(halves, axis=1)


@triton.jit
def _describe_bags(
    bags: tl.tensor,
    is_bag: tl.tensor,
    offsets: tl.tensor,
    columns: tl.tensor,
    means: tl.tensor,
    matrix_stride: tl.tensor,
    batch_size: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of each bag: its first id, its number of ids, what its sum is divided by, and where its vector begins.

    The vectors lie in a matrix with a row per sample.
    """
    features = bags // batch_size
    begins = tl.load(offsets + bags, mask=is_bag, other=0)
    counts = tl.load(offsets + bags + 1, mask=is_bag, other=0) - begins
    is_mean = tl.load(means + features, mask=is_bag, other=0) != 0
    divisors = tl.where(is_mean, tl.maximum(counts, 1), 1).to(tl.float32)
    first = (bags % batch_size).to(tl.int64) * matrix_stride + tl.load(columns + features, mask=is_bag, other=0)
    return begins, counts, divisors, first


@_kernel(["slot_of_id", "offsets", "weights", "columns", "means", "batch_size", "bag_count"])
def lookup_pooled_kernel(
    rows: tl.tensor,
    slot_of_id: tl.tensor,
    offsets: tl.tensor,
    weights: tl.tensor,
    columns: tl.tensor,
    means: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    output_stride: tl.tensor,
    batch_size: tl.tensor,
    bag_count: tl.tensor,
    dim: tl.constexpr,
    weighted: tl.constexpr,
    bags_per_program: tl.constexpr,
    block: tl.constexpr,
) -> None:
    bags = tl.program_id(0) * bags_per_program + tl.arange(0, bags_per_program)
    is_bag = bags < bag_count
    begins, counts, divisors, first = _describe_bags(bags, is_bag, offsets, columns, means, output_stride, batch_size)
    elements = tl.arange(0, block)[None, :]
    in_row = elements < dim
    total = tl.zeros([bags_per_program, block], tl.float32)
    for number in range(tl.max(counts, axis=0)):
        has_id = number < counts
        slots = tl.load(slot_of_id + begins + number, mask=has_id, other=0).to(tl.int64)
        mask = has_id[:, None] & in_row
        vectors = tl.load(rows + slots[:, None] * width + elements, mask=mask, other=0.0)
        if weighted:
            vectors *= tl.load(weights + begins + number, mask=has_id, other=0.0)[:, None]
        # The first is not added to zero, which would lose the sign of a negative zero.
        total = tl.where(mask, tl.where(number == 0, vectors, total + vectors), total)
    pooled = tl.div_rn(total, tl.broadcast_to(divisors[:, None], [bags_per_program, block]))
    tl.store(output + first[:, None] + elements, pooled, mask=is_bag[:, None] & in_row)


@_kernel(["slot_of_id", "id_count"])
def lookup_rows_kernel(
    rows: tl.tensor,
    slot_of_id: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    output_stride: tl.tensor,
    id_count: tl.tensor,
    dim: tl.constexpr,
    ids_per_program: tl.constexpr,
    block: tl.constexpr,
) -> None:
    ids = tl.program_id(0) * ids_per_program + tl.arange(0, ids_per_program)
    is_id = ids < id_count
    slots = tl.load(slot_of_id + ids, mask=is_id, other=0).to(tl.int64)
    elements = tl.arange(0, block)[None, :]
    mask = is_id[:, None] & (elements < dim)
    vectors = tl.load(rows + slots[:, None] * width + elements, mask=mask)
    tl.store(output + ids.to(tl.int64)[:, None] * output_stride + elements, vectors, mask=mask)


@_kernel(["slot_of_id", "offsets", "columns", "means", "batch_size", "bag_count"])
def weight_gradients_kernel(
    rows: tl.tensor,
    slot_of_id: tl.tensor,
    offsets: tl.tensor,
    columns: tl.tensor,
    means: tl.tensor,
    gradient: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    batch_size: tl.tensor,
    bag_count: tl.tensor,
    dim: tl.constexpr,
    bags_per_program: tl.constexpr,
) -> None:
    bags = tl.program_id(0) * bags_per_program + tl.arange(0, bags_per_program)
    is_bag = bags < bag_count
    begins, counts, divisors, first = _describe_bags(bags, is_bag, offsets, columns, means, gradient_stride, batch_size)
    lane = tl.arange(0, LANES)[None, :]
    for number in range(tl.max(counts, axis=0)):
        has_id = number < counts
        slots = tl.load(slot_of_id + begins + number, mask=has_id, other=0).to(tl.int64)
        lanes = tl.zeros([bags_per_program, LANES], tl.float32)
        for column in range(0, dim, LANES):
            elements = column + lane
            mask = has_id[:, None] & (elements < dim)
            vectors = tl.load(rows + slots[:, None] * width + elements, mask=mask, other=0.0)
            lanes += vectors * tl.load(gradient + first[:, None] + elements, mask=mask, other=0.0)
        product = tl.div_rn(_sum_lanes(lanes, bags_per_program), divisors)
        # The host adds to zero, which turns a negative zero positive.
        product = tl.where(product == 0.0, 0.0, product)
        tl.store(output + begins + number, product, mask=has_id)


@triton.jit
def _one_gradient(
    index: tl.tensor,
    gradient: tl.tensor,
    gradient_stride: tl.tensor,
    gradient_rows: tl.tensor,
    gradient_columns: tl.tensor,
    factors: tl.tensor,
    dim: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The gradient of occurrence ``index``, times its factor."""
    elements = tl.arange(0, block)
    first = tl.load(gradient_rows + index).to(tl.int64) * gradient_stride + tl.load(gradient_columns + index)
    vector = tl.load(gradient + first + elements, mask=elements < dim, other=0.0)
    if scaled:
        vector *= tl.load(factors + index)
    return vector


@triton.jit
def _sum_gradients(
    begin: tl.tensor,
    end: tl.tensor,
    gradient: tl.tensor,
    gradient_stride: tl.tensor,
    gradient_rows: tl.tensor,
    gradient_columns: tl.tensor,
    factors: tl.tensor,
    dim: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The sum of occurrences ``[begin, end)``, of which there is at least one, in order."""
    total = _one_gradient(
        begin, gradient, gradient_stride, gradient_rows, gradient_columns, factors, dim, scaled, block
    )
    for index in tl.range(begin + 1, end, loop_unroll_factor=UNROLL):
        total += _one_gradient(
            index, gradient, gradient_stride, gradient_rows, gradient_columns, factors, dim, scaled, block
        )
    return total


@_kernel(["gradient_rows", "gradient_columns", "factors", "chunk_begin", "chunk_end"])
def sum_chunks_kernel(
    gradient: tl.tensor,
    gradient_rows: tl.tensor,
    gradient_columns: tl.tensor,
    factors: tl.tensor,
    chunk_begin: tl.tensor,
    chunk_end: tl.tensor,
    partial: tl.tensor,
    gradient_stride: tl.tensor,
    dim: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    begin, end = tl.load(chunk_begin + chunk), tl.load(chunk_end + chunk)
    total = _sum_gradients(
        begin, end, gradient, gradient_stride, gradient_rows, gradient_columns, factors, dim, scaled, block
    )
    elements = tl.arange(0, block)
    tl.store(partial + chunk.to(tl.int64) * dim + elements, total, mask=elements < dim)


@triton.jit
def _sum_partials(
    first: tl.tensor, count: tl.tensor, partial: tl.tensor, dim: tl.constexpr, block: tl.constexpr
) -> tl.tensor:
    """The sum of ``count`` chunks from ``first`` on, in order."""
    elements = tl.arange(0, block)
    source = partial + first.to(tl.int64) * dim + elements
    total = tl.load(source, mask=elements < dim, other=0.0)
    for _ in range(1, count):
        source += dim
        total += tl.load(source, mask=elements < dim, other=0.0)
    return total


@triton.jit
def _sum_squares(total: tl.tensor, dim: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """``[1]``: the sum of the squares of ``total`` ``[block]``, zero behind ``dim``, in LANES interleaved sums."""
    squares = tl.reshape(total * total, [block // LANES, LANES])
    group = tl.arange(0, block // LANES)[:, None]
    lanes = tl.zeros([LANES], tl.float32)
    for number in range((dim + LANES - 1) // LANES):
        # Picks one group of columns: a square is not changed by the zeros added to it, whatever the order.
        lanes += tl.sum(tl.where(group == number, squares, 0.0), axis=0)
    return _sum_lanes(lanes[None, :], 1)


@triton.jit
def _adagrad_change(
    total: tl.tensor, state: tl.tensor, mask: tl.tensor, step_size: tl.tensor, eps: tl.tensor
) -> tl.tensor:
    accumulated = tl.load(state, mask=mask, other=0.0) + total * total
    tl.store(state, accumulated, mask=mask)
    return step_size * tl.div_rn(total, tl.sqrt_rn(accumulated) + eps)


@triton.jit
def _rowwise_adagrad_change(
    total: tl.tensor,
    state: tl.tensor,
    step_size: tl.tensor,
    eps: tl.tensor,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    place = state + tl.arange(0, 1)
    dims = tl.full([1], dim, tl.float32)
    accumulated = tl.load(place) + tl.div_rn(_sum_squares(total, dim, block), dims)
    # Every warp reads the one value, and one of them overwrites it.
    tl.debug_barrier()
    tl.store(place, accumulated)
    return tl.div_rn(step_size + tl.zeros([1], tl.float32), tl.sqrt_rn(accumulated) + eps) * total


@triton.jit
def _adam_change(
    total: tl.tensor,
    averages: tl.tensor,
    squares: tl.tensor,
    mask: tl.tensor,
    step_size: tl.tensor,
    eps: tl.tensor,
    rate1: tl.tensor,
    rate2: tl.tensor,
) -> tl.tensor:
    average = tl.load(averages, mask=mask, other=0.0)
    square = tl.load(squares, mask=mask, other=0.0)
    average = average + (total - average) * rate1
    square = square + (total * total - square) * rate2
    tl.store(averages, average, mask=mask)
    tl.store(squares, square, mask=mask)
    return step_size * tl.div_rn(average, tl.sqrt_rn(square) + eps)


@_kernel(["slots", "starts", "gradient_rows", "gradient_columns", "factors", "first_partial"])
def update_kernel(
    rows: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    gradient: tl.tensor,
    gradient_rows: tl.tensor,
    gradient_columns: tl.tensor,
    factors: tl.tensor,
    first_partial: tl.tensor,
    partial: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    step_size: tl.tensor,
    weight_decay: tl.tensor,
    eps: tl.tensor,
    rate1: tl.tensor,
    rate2: tl.tensor,
    dim: tl.constexpr,
    optimizer: tl.constexpr,
    decayed: tl.constexpr,
    scaled: tl.constexpr,
    block: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    begin, end = tl.load(starts + index), tl.load(starts + index + 1)
    first_chunk = tl.load(first_partial + index)
    if first_chunk < 0:
        total = _sum_gradients(
            begin, end, gradient, gradient_stride, gradient_rows, gradient_columns, factors, dim, scaled, block
        )
    else:
        total = _sum_partials(first_chunk, tl.cdiv(end - begin, CHUNK), partial, dim, block)
    elements = tl.arange(0, block)
    mask = elements < dim
    row = rows + tl.load(slots + index).to(tl.int64) * width
    old = tl.load(row + elements, mask=mask, other=0.0)
    if decayed:
        total += weight_decay * old
    if optimizer == SGD:
        change = step_size * total
    elif optimizer == ADAGRAD:
        change = _adagrad_change(total, row + dim + elements, mask, step_size, eps)
    elif optimizer == ROWWISE_ADAGRAD:
        change = _rowwise_adagrad_change(total, row + dim, step_size, eps, dim, block)
    else:
        state = row + dim + elements
        change = _adam_change(total, state, state + dim, mask, step_size, eps, rate1, rate2)
    tl.store(row + elements, old - change, mask=mask)


@_kernel(["source_rows", "target_rows", "count"])
def copy_rows_kernel(
    source: tl.tensor,
    source_rows: tl.tensor,
    target: tl.tensor,
    target_rows: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    count: tl.tensor,
    width: tl.constexpr,
    rows_per_program: tl.constexpr,
    block: tl.constexpr,
) -> None:
    numbers = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    is_row = numbers < count
    from_rows = tl.load(source_rows + numbers, mask=is_row, other=0)[:, None]
    to_rows = tl.load(target_rows + numbers, mask=is_row, other=0)[:, None]
    elements = tl.arange(0, block)[None, :]
    mask = is_row[:, None] & (elements < width)
    records = tl.load(source + from_rows * source_stride + elements, mask=mask)
    tl.store(target + to_rows * target_stride + elements, records, mask=mask)
