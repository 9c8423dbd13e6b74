"""The backward pass over host tables: one update of every row that a batch used."""

from __future__ import annotations

import numpy as np

from recsys_offload.embedding.gradient import RowMajor
from recsys_offload.embedding.kernels import layout
from recsys_offload.embedding.kernels.host_update import sum_chunks, update_rows
from recsys_offload.embedding.plan import Plan
from recsys_offload.embedding.store import TableGroup
from recsys_offload.embedding.threads import KernelThreads

# What a row costs beside its gradients, in units of one gradient: it is read and written, with its state.
ROW_COST = 3


def update(
    group: TableGroup, plan: Plan, gradient: RowMajor, optimizer: int, parameters: np.ndarray, threads: KernelThreads
) -> None:
    """Sums the gradients of each of the plan's rows and applies the optimizer to it.

    Args:
        group: the tables to update.
        plan: of the batch, made for this group.
        gradient: of the lookup's output.
        optimizer: one of the codes of ``kernels/layout.py``.
        parameters: float32, see ``kernels/layout.py``.
        threads: that do the work; the result does not depend on how many there are.
    """
    occurrences = np.diff(plan.starts)
    hot = np.flatnonzero(occurrences > layout.CHUNK)
    chunks = -(-occurrences[hot] // layout.CHUNK)
    hot_starts = np.concatenate([[0], np.cumsum(chunks)])
    partial = np.empty((hot_starts[-1], group.dim), np.float32)
    if hot.size:
        chunk_in_row = np.arange(hot_starts[-1]) - np.repeat(hot_starts[:-1], chunks)
        chunk_begin = np.repeat(plan.starts[hot], chunks) + chunk_in_row * layout.CHUNK
        chunk_end = np.minimum(chunk_begin + layout.CHUNK, np.repeat(plan.starts[hot + 1], chunks))
        threads.run(
            sum_chunks,
            threads.even_bounds(len(partial)),
            gradient.flat,
            gradient.row_stride,
            plan.gradient_rows,
            plan.gradient_columns,
            plan.factors,
            chunk_begin,
            chunk_end,
            partial,
        )
    cost = occurrences + ROW_COST
    cost[hot] = chunks + ROW_COST
    threads.run(
        update_rows,
        threads.cost_bounds(np.concatenate([[0], np.cumsum(cost)])),
        optimizer,
        parameters,
        group.rows,
        plan.rows,
        plan.starts,
        gradient.flat,
        gradient.row_stride,
        plan.gradient_rows,
        plan.gradient_columns,
        plan.factors,
        hot,
        hot_starts,
        partial,
        group.dim,
    )
