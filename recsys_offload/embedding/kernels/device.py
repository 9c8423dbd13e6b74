"""Launches the Triton kernels over slots on a device. Importing this module raises ImportError where Triton is missing.

Arrays are torch tensors on the device: int32 indices and float32 values, contiguous where nothing else is said. The
names are those of ``SlotBatch``, ``Plan`` and ``HotChunks``: N ids, n distinct rows, F features, B samples, S slots of
W values each.
"""

from __future__ import annotations

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from recsys_offload.embedding.kernels import layout
from recsys_offload.embedding.kernels.device_kernels import (
    copy_rows_kernel,
    lookup_pooled_kernel,
    lookup_rows_kernel,
    sum_chunks_kernel,
    update_kernel,
    weight_gradients_kernel,
)

# Elements in the tile of a program that works on several rows at once, and the warps that share it.
TILE = 512
TILE_WARPS = 4
# Elements per warp of a program that works on one row.
ROW_ELEMENTS_PER_WARP = 256
MOST_WARPS = 8


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
    """Pools the bags of every feature: their rows added in the order of the ids; zeros for an empty bag.

    Args:
        rows: float32 ``[S, W]``.
        dim: weights per row.
        slot_of_id: int32 ``[N]``, feature by feature.
        offsets: int32 ``[F * B + 1]``: where each bag's ids begin.
        weights: float32 ``[N]``, or ``[0]`` where the ids have none.
        columns: int32 ``[F]``: the first column of each feature's vector in ``output``.
        means: bool ``[F]``: whether a bag's sum is divided by the number of its ids.
        output: float32 ``[B, D]``; its rows may lie apart.
    """
    bags, block = len(offsets) - 1, triton.next_power_of_2(dim)
    bags_per_program = max(1, TILE // block)
    lookup_pooled_kernel[(triton.cdiv(bags, bags_per_program),)](
        rows,
        slot_of_id,
        offsets,
        weights,
        columns,
        means,
        output,
        rows.stride(0),
        output.stride(0),
        len(output),
        bags,
        dim=dim,
        weighted=len(weights) > 0,
        bags_per_program=bags_per_program,
        block=block,
        num_warps=TILE_WARPS,
        enable_fp_fusion=False,
    )


def lookup_rows(rows: Tensor, dim: int, slot_of_id: Tensor, output: Tensor) -> None:
    """Copies the weights of every id.

    Args:
        rows: float32 ``[S, W]``.
        dim: weights per row.
        slot_of_id: int32 ``[N]``.
        output: float32 ``[N, dim]``; its rows may lie apart.
    """
    block = triton.next_power_of_2(dim)
    ids_per_program = max(1, TILE // block)
    lookup_rows_kernel[(triton.cdiv(len(slot_of_id), ids_per_program),)](
        rows,
        slot_of_id,
        output,
        rows.stride(0),
        output.stride(0),
        len(slot_of_id),
        dim=dim,
        ids_per_program=ids_per_program,
        block=block,
        num_warps=TILE_WARPS,
    )


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
    """The dot product of every id's row with its bag's gradient; of a mean, divided by the number of the bag's ids.

    Args:
        rows: float32 ``[S, W]``.
        dim: weights per row.
        slot_of_id: int32 ``[N]``, feature by feature.
        offsets: int32 ``[F * B + 1]``: where each bag's ids begin.
        columns: int32 ``[F]``: the first column of each feature's vector in ``gradient``.
        means: bool ``[F]``.
        gradient: float32 ``[B, D]``, of the pooled output; its rows may lie apart.
        output: float32 ``[N]``, overwritten.
    """
    bags = len(offsets) - 1
    bags_per_program = TILE // layout.LANES
    weight_gradients_kernel[(triton.cdiv(bags, bags_per_program),)](
        rows,
        slot_of_id,
        offsets,
        columns,
        means,
        gradient,
        output,
        rows.stride(0),
        gradient.stride(0),
        len(gradient),
        bags,
        dim=dim,
        bags_per_program=bags_per_program,
        num_warps=TILE_WARPS,
        enable_fp_fusion=False,
    )


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
    """Sums the gradients of every distinct row and applies the optimizer to it, state included.

    Args:
        rows: float32 ``[S, W]``: weights in the first ``dim`` columns, state behind them.
        dim: weights per row.
        optimizer: one of the codes of layout.py.
        parameters: float32 on the host, see layout.py.
        slots: int32 ``[n]``: where each distinct row lies.
        starts: int32 ``[n + 1]``: where the occurrences of each begin.
        gradient: float32 ``[B, D]``, of the lookup's output; its rows may lie apart.
        gradient_rows: int32 ``[N]``, by occurrence: the row of ``gradient`` and
        gradient_columns: int32 ``[N]``: the first column in it.
        factors: float32 ``[N]``: what an occurrence's gradient is multiplied by; ``[0]`` if by 1.
        first_partial: int32 ``[n]``: the first chunk of a row with more than ``CHUNK`` occurrences, or -1.
        chunk_begin: int32 ``[c]``: the first occurrence of each chunk, and
        chunk_end: int32 ``[c]``: the one behind its last.
    """
    block = max(layout.LANES, triton.next_power_of_2(dim))
    warps = min(MOST_WARPS, max(1, block // ROW_ELEMENTS_PER_WARP))
    scaled = len(factors) > 0
    partial = torch.empty(len(chunk_begin), dim, device=rows.device)
    sum_chunks_kernel[(len(chunk_begin),)](
        gradient,
        gradient_rows,
        gradient_columns,
        factors,
        chunk_begin,
        chunk_end,
        partial,
        gradient.stride(0),
        dim=dim,
        scaled=scaled,
        block=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    update_kernel[(len(slots),)](
        rows,
        slots,
        starts,
        gradient,
        gradient_rows,
        gradient_columns,
        factors,
        first_partial,
        partial,
        rows.stride(0),
        gradient.stride(0),
        float(parameters[layout.STEP_SIZE]),
        float(parameters[layout.WEIGHT_DECAY]),
        float(parameters[layout.EPS]),
        float(parameters[layout.ONE_MINUS_BETA1]),
        float(parameters[layout.ONE_MINUS_BETA2]),
        dim=dim,
        optimizer=optimizer,
        decayed=bool(parameters[layout.WEIGHT_DECAY] != 0),
        scaled=scaled,
        block=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    count, width = len(source_rows), source.shape[1]
    block = triton.next_power_of_2(width)
    rows_per_program = max(1, TILE // block)
    copy_rows_kernel[(triton.cdiv(count, rows_per_program),)](
        source,
        source_rows,
        target,
        target_rows,
        source.stride(0),
        target.stride(0),
        count,
        width=width,
        rows_per_program=rows_per_program,
        block=block,
        num_warps=TILE_WARPS,
    )


def fetch_rows(host: Tensor, host_rows: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copies rows of the host into slots, over the bus: the host's memory is read from the device.

    Args:
        host: float32 ``[R, W]``, pinned host memory.
        host_rows: int64 ``[m]``, on the device.
        rows: float32 ``[S, W]``, on the device.
        slots: int64 ``[m]``, distinct, on the device.
    """
    _copy_rows(host, host_rows, rows, slots)


def write_back_rows(host: Tensor, host_rows: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copies slots into rows of the host, over the bus; the arguments are those of ``fetch_rows``."""
    _copy_rows(rows, slots, host, host_rows)
