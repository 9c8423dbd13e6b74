"""What ``device.py`` computes, in plain torch operations: for devices that Triton has no compiler for.

Every operation rounds where the kernels of the host and of Triton round, and every sum runs in their order: the same
bits, but more launches and more memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from recsys_offload.embedding.kernels import layout, reference


def _sum_ranges(begin: Tensor, end: Tensor, dim: int, take: Callable[[Tensor], Tensor]) -> Tensor:
    """For each range of positions, the sum of its vectors in order, from the first one on; zeros for an empty range.

    Args:
        begin: int64 ``[n]`` and
        end: int64 ``[n]``: the ranges.
        dim: of a vector.
        take: positions, int64 ``[m]`` -> their vectors, float32 ``[m, dim]``.
    """
    sums = torch.zeros(len(begin), dim, device=begin.device)
    lengths = end - begin
    for number in range(int(lengths.max()) if len(lengths) else 0):
        longer = torch.nonzero(lengths > number).flatten()
        vectors = take(begin[longer] + number)
        sums[longer] = vectors if number == 0 else sums[longer] + vectors
    return sums


def lookup_pooled(
    rows: Tensor,
    dim: int,
    slot_of_id: Tensor,
    offsets: Tensor,
    weights: Tensor,
    columns: Tensor,
    means: Tensor,
    output: Tensor,
) -> None:
    """Pools bags of rows, as ``device.lookup_pooled``.

    Args:
        rows: float32 ``[S, W]``.
        dim: weights per row.
        slot_of_id: int32 ``[N]``.
        offsets: int32 ``[F * B + 1]``.
        weights: float32 ``[N]``, or ``[0]`` where ids have none.
        columns: int32 ``[F]``: the first column of each feature in ``output``.
        means: bool ``[F]``.
        output: float32 ``[B, D]``, written to.
    """

    def take(positions: Tensor) -> Tensor:
        vectors = rows[slot_of_id[positions].long(), :dim]
        return vectors * weights[positions, None] if len(weights) else vectors

    batch_size = len(output)
    begin, end = offsets[:-1].long(), offsets[1:].long()
    sums = _sum_ranges(begin, end, dim, take)
    of_mean = means.repeat_interleave(batch_size)
    sums /= torch.where(of_mean, (end - begin).clamp(min=1), 1)[:, None].float()
    for feature, column in enumerate(columns.tolist()):
        output[:, column : column + dim] = sums[feature * batch_size : (feature + 1) * batch_size]


def lookup_rows(rows: Tensor, dim: int, slot_of_id: Tensor, output: Tensor) -> None:
    """Copies the weights of every id, int32 ``[N]``, into ``output``, float32 ``[N, dim]``."""
    output.copy_(rows[slot_of_id.long(), :dim])


def update(
    rows: Tensor,
    dim: int,
    optimizer: int,
    parameters: np.ndarray,
    slots: Tensor,
    starts: Tensor,
    gradient: Tensor,
    gradient_rows: Tensor,
    gradient_columns: Tensor,
    factors: Tensor,
    first_partial: Tensor,
    chunk_begin: Tensor,
    chunk_end: Tensor,
) -> None:
    """Sums each row's gradients in order, hot rows by chunks, and applies the optimizer, as ``device.update``.

    Args:
        rows: float32 ``[S, W]``, changed in place.
        dim: weights per row.
        optimizer: one of the codes of layout.py.
        parameters: float32, see layout.py.
        slots: int32 ``[n]``: of the distinct rows.
        starts: int32 ``[n + 1]``: where each row's occurrences begin.
        gradient: float32 ``[rows, columns]``, of the lookup's output.
        gradient_rows: int32 ``[N]`` and
        gradient_columns: int32 ``[N]``: where each occurrence's gradient begins.
        factors: float32 ``[N]``, or ``[0]`` for all ones.
        first_partial: int32 ``[n]``: the first chunk of a hot row; -1 for the others.
        chunk_begin: int32 ``[c]`` and
        chunk_end: int32 ``[c]``: the occurrences of every chunk.
    """
    if len(slots) == 0:
        return
    columns = torch.arange(dim, device=rows.device)

    def take(positions: Tensor) -> Tensor:
        first_columns = gradient_columns[positions].long()
        vectors = gradient[gradient_rows[positions].long()[:, None], first_columns[:, None] + columns]
        return vectors * factors[positions, None] if len(factors) else vectors

    partial = _sum_ranges(chunk_begin.long(), chunk_end.long(), dim, take)
    begin, end = starts[:-1].long(), starts[1:].long()
    hot = first_partial >= 0
    totals = _sum_ranges(begin, torch.where(hot, begin, end), dim, take)
    first = first_partial[hot].long()
    chunks = (end - begin)[hot].add(layout.CHUNK - 1).div(layout.CHUNK, rounding_mode="floor")
    totals[hot] = _sum_ranges(first, first + chunks, dim, lambda positions: partial[positions])
    on_device = torch.from_numpy(parameters).to(rows.device)
    reference.update(optimizer, on_device, rows[:, :dim], _state(rows, dim, optimizer), slots.long(), totals)


def _state(rows: Tensor, dim: int, optimizer: int) -> dict[str, Tensor]:
    """Views of the optimizer's state in ``rows``."""
    if optimizer == layout.ADAGRAD:
        return {"sum": rows[:, dim:]}
    if optimizer == layout.ROWWISE_ADAGRAD:
        return {"sum": rows[:, dim]}
    if optimizer == layout.ADAM:
        return {"exp_avg": rows[:, dim : 2 * dim], "exp_avg_sq": rows[:, 2 * dim :]}
    return {}


def weight_gradients(
    rows: Tensor,
    dim: int,
    slot_of_id: Tensor,
    offsets: Tensor,
    columns: Tensor,
    means: Tensor,
    gradient: Tensor,
    output: Tensor,
) -> None:
    """The gradient of every id's weight: its row times its bag's gradient, as ``device.weight_gradients``.

    Args:
        rows: float32 ``[S, W]``.
        dim: weights per row.
        slot_of_id: int32 ``[N]``.
        offsets: int32 ``[F * B + 1]``.
        columns: int32 ``[F]``: the first column of each feature in ``gradient``.
        means: bool ``[F]``.
        gradient: float32 ``[B, D]``, of the pooled output.
        output: float32 ``[N]``, written to.
    """
    batch_size, device = len(gradient), rows.device
    lengths = offsets.diff().long()
    bags = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    if len(bags) == 0:
        return
    features, samples = bags // batch_size, bags % batch_size
    taken = gradient[samples[:, None], columns.long()[features, None] + torch.arange(dim, device=device)]
    products = reference.sum_columns(rows[slot_of_id.long(), :dim] * taken)
    # The host adds to a zero: a negative zero becomes a positive one.
    output.copy_(torch.where(means[features], products / lengths[bags].float(), products) + 0.0)
