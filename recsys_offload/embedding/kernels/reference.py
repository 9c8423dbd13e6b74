"""The same arithmetic in plain torch with every table resident: the oracle that the tests compare to, bit by bit.

Slow and short on purpose. Every operation rounds where the kernels round, and every sum runs in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_offload.embedding.kernels import layout


def _sum_in_order(groups: Tensor, vectors: Tensor, count: int) -> Tensor:
    """``[count, dim]``: for each group, the sum of its vectors, added one after the other in the order given."""
    order = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups, minlength=count)
    starts = torch.cumsum(sizes, 0) - sizes
    sums = torch.zeros(count, vectors.shape[1])
    for number in range(int(sizes.max()) if len(groups) else 0):
        having = torch.nonzero(sizes > number).flatten()
        chosen = vectors[order[starts[having] + number]]
        sums[having] = chosen if number == 0 else sums[having] + chosen
    return sums


def lookup_pooled(weight: Tensor, values: Tensor, offsets: Tensor, mean: bool, id_weights: Tensor | None) -> Tensor:
    """Pools bags of rows.

    Args:
        weight: float32 ``[rows, dim]``.
        values: int64 ``[N]``.
        offsets: int64 ``[B + 1]``.
        mean: divide each bag's sum by its number of ids.
        id_weights: float32 ``[N]`` or None.

    Returns:
        float32 ``[B, dim]``; zeros for empty bags.
    """
    lengths = offsets.diff()
    bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    vectors = weight[values] if id_weights is None else weight[values] * id_weights[:, None]
    sums = _sum_in_order(bags, vectors, len(lengths))
    return sums / lengths.clamp(min=1)[:, None].float() if mean else sums


def id_gradients(gradient: Tensor, offsets: Tensor, mean: bool, id_weights: Tensor | None) -> Tensor:
    """The gradient of every id's row, float32 ``[N, dim]``, from the pooled output's, ``[B, dim]``."""
    lengths = offsets.diff()
    bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if id_weights is None and not mean:
        return gradient[bags]
    factors = torch.ones(len(bags)) if id_weights is None else id_weights
    if mean:
        factors = factors / lengths[bags].float()
    return gradient[bags] * factors[:, None]


def sum_by_row(rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Sums gradients by row, in chunks of ``CHUNK`` occurrences.

    Args:
        rows: int64 ``[N]``.
        gradients: float32 ``[N, dim]``, in batch order.

    Returns:
        The distinct rows, int64 ``[n]``, and the sum for each, float32 ``[n, dim]``.
    """
    distinct, inverse = torch.unique(rows, return_inverse=True)
    occurrence = torch.zeros_like(inverse)
    seen: dict[int, int] = {}
    for index, row in enumerate(inverse.tolist()):
        occurrence[index] = seen.get(row, 0)
        seen[row] = seen.get(row, 0) + 1
    chunk = occurrence // layout.CHUNK
    chunks, chunk_of_id = torch.unique(torch.stack([inverse, chunk]), dim=1, return_inverse=True)
    partial = _sum_in_order(chunk_of_id, gradients, chunks.shape[1])
    return distinct, _sum_in_order(chunks[0], partial, len(distinct))


def sum_columns(matrix: Tensor) -> Tensor:
    """The sum of each row, float32 ``[n]``, in LANES interleaved sums added pairwise."""
    rows, columns = matrix.shape
    lanes = torch.zeros(rows, layout.LANES, device=matrix.device)
    for first in range(0, columns, layout.LANES):
        part = matrix[:, first : first + layout.LANES]
        lanes[:, : part.shape[1]] += part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _root(values: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own float32 root is off by one bit for some values on some CPUs."""
    return values.double().sqrt().float()


def update(
    optimizer: int, parameters: Tensor, weight: Tensor, state: dict[str, Tensor], rows: Tensor, gradients: Tensor
) -> None:
    """Applies one update to distinct rows, in place.

    Args:
        optimizer: one of the codes of layout.py.
        parameters: float32, see layout.py.
        weight: float32 ``[R, dim]``.
        state: the optimizer's, as ``HostTables.optimizer_state`` gives it.
        rows: int64 ``[n]``, distinct.
        gradients: float32 ``[n, dim]``, summed.
    """
    step_size, eps = parameters[layout.STEP_SIZE], parameters[layout.EPS]
    old = weight[rows]
    if parameters[layout.WEIGHT_DECAY] != 0:
        gradients = gradients + parameters[layout.WEIGHT_DECAY] * old
    if optimizer == layout.SGD:
        change = step_size * gradients
    elif optimizer == layout.ADAGRAD:
        state["sum"][rows] += gradients * gradients
        change = step_size * (gradients / (_root(state["sum"][rows]) + eps))
    elif optimizer == layout.ROWWISE_ADAGRAD:
        state["sum"][rows] += sum_columns(gradients * gradients) / gradients.shape[1]
        change = (step_size / (_root(state["sum"][rows]) + eps))[:, None] * gradients
    else:
        average, square = state["exp_avg"][rows], state["exp_avg_sq"][rows]
        average = average + (gradients - average) * parameters[layout.ONE_MINUS_BETA1]
        square = square + (gradients * gradients - square) * parameters[layout.ONE_MINUS_BETA2]
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = average, square
        change = step_size * (average / (_root(square) + eps))
    weight[rows] = old - change
