"""The backward pass over host tables: one update of every row that a batch used."""

from __future__ import annotations

import numpy as np

from recsys_offload.embedding.gradient import RowMajor
from recsys_offload.embedding.kernels.host_update import sum_chunks, update_rows
from recsys_offload.embedding.plan import HotChunks, Plan
from recsys_offload.embedding.threads import KernelThreads

# What a row costs beside its gradients, in units of one gradient: it is read and written, with its state.
ROW_COST = 3


def update(
    rows: np.ndarray,
    dim: int,
    places: np.ndarray,
    plan: Plan,
    gradient: RowMajor,
    optimizer: int,
    parameters: np.ndarray,
    threads: KernelThreads,
) -> None:
    """Sums the gradients of each of the plan's rows and applies the optimizer to it.

    Args:
        rows: float32 ``[R, W]``: the tables' rows, or slots that hold them.
        dim: weights per row.
        places: integers ``[n]``: where in ``rows`` each of the plan's rows lies.
        plan: of the batch.
        gradient: of the lookup's output.
        optimizer: one of the codes of ``kernels/layout.py``.
        parameters: float32, see ``kernels/layout.py``.
        threads: that do the work; the result does not depend on how many there are.
    """
    chunks = HotChunks.of(plan)
    partial = np.empty((len(chunks.begin), dim), np.float32)
    if len(partial):
        threads.run(
            sum_chunks,
            threads.even_bounds(len(partial)),
            gradient.flat,
            gradient.row_stride,
            plan.gradient_rows,
            plan.gradient_columns,
            plan.factors,
            chunks.begin,
            chunks.end,
            partial,
        )
    cost = np.diff(plan.starts) + ROW_COST
    cost[chunks.hot] = np.diff(chunks.hot_starts) + ROW_COST
    threads.run(
        update_rows,
        threads.cost_bounds(np.concatenate([[0], np.cumsum(cost)])),
        optimizer,
        parameters,
        rows,
        places,
        plan.starts,
        gradient.flat,
        gradient.row_stride,
        plan.gradient_rows,
        plan.gradient_columns,
        plan.factors,
        chunks.hot,
        chunks.hot_starts,
        partial,
        dim,
    )
