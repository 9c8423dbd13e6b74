"""Rows on their way to batches: a block of decoded, converted rows, and a batch cut from blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.data.batch import Batch
from recsys_offload.data.convert import Bags
from recsys_offload.data.convert_kernels import take, take_bags
from recsys_offload.reused_memory import ReusedMemory

FILE_STRIDE = 2**40


@dataclass(frozen=True)
class Block:
    """Converted rows.

    Attributes:
        dense: float32 ``[F, rows]``.
        sparse: the ids of each feature.
        labels: float32 ``[rows]``, or ``[0]`` if not read.
        weights: float32 ``[rows]``, or None.
        sources: int64 ``[rows]``: ``FILE_STRIDE`` times the place of a row's file in ``paths``, plus its row there.
        paths: names of the files.
    """

    dense: np.ndarray
    sparse: list[Bags]
    labels: np.ndarray
    weights: np.ndarray | None
    sources: np.ndarray
    paths: list[str]

    def __len__(self) -> int:
        return len(self.sources)

    def origin(self, row: int) -> str:
        """Where a row came from."""
        file, row_in_file = divmod(int(self.sources[row]), FILE_STRIDE)
        return f"row {row_in_file} of {self.paths[file]}"


def _permute_bags(bags: Bags, order: np.ndarray) -> Bags:
    if bags.offsets is None:
        values = np.empty_like(bags.values)
        take(bags.values, order, values)
        weights = None
        if bags.weights is not None:
            weights = np.empty_like(bags.weights)
            take(bags.weights, order, weights)
        return Bags(values, None, weights)
    offsets = np.concatenate([[0], np.cumsum(np.diff(bags.offsets)[order])])
    values = np.empty_like(bags.values, shape=offsets[-1])
    take_bags(bags.values, bags.offsets, order, offsets, values)
    weights = None
    if bags.weights is not None:
        weights = np.empty_like(bags.weights, shape=offsets[-1])
        take_bags(bags.weights, bags.offsets, order, offsets, weights)
    return Bags(values, offsets, weights)


def permute(block: Block, order: np.ndarray) -> Block:
    """The block's rows in another order."""
    dense = np.empty_like(block.dense)
    for column, target in zip(block.dense, dense, strict=True):
        take(column, order, target)
    sources = np.empty_like(block.sources)
    take(block.sources, order, sources)
    return Block(
        dense,
        [_permute_bags(bags, order) for bags in block.sparse],
        block.labels[order] if len(block.labels) else block.labels,
        None if block.weights is None else block.weights[order],
        sources,
        block.paths,
    )


def _joined_bags(parts: Sequence[Bags], rows: Sequence[int]) -> Bags:
    offsets = None
    if any(part.offsets is not None for part in parts):
        lengths = [
            np.ones(count, np.int64) if part.offsets is None else np.diff(part.offsets)
            for part, count in zip(parts, rows, strict=True)
        ]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
    return Bags(np.concatenate([part.values for part in parts]), offsets, weights)


def concatenate(blocks: Sequence[Block]) -> Block:
    """The rows of several blocks, one after the other."""
    if len(blocks) == 1:
        return blocks[0]
    rows = [len(block) for block in blocks]
    paths: list[str] = []
    sources = []
    for block in blocks:
        sources.append(block.sources + len(paths) * FILE_STRIDE)
        paths += block.paths
    return Block(
        np.concatenate([block.dense for block in blocks], axis=1),
        [_joined_bags([block.sparse[i] for block in blocks], rows) for i in range(len(blocks[0].sparse))],
        np.concatenate([block.labels for block in blocks]),
        None if blocks[0].weights is None else np.concatenate([block.weights for block in blocks]),
        np.concatenate(sources),
        paths,
    )


@lru_cache(maxsize=8)
def _one_id_per_bag(bags: int) -> tuple[Tensor, Tensor]:
    """Lengths and offsets where every bag has one id; shared by all batches of one size."""
    return torch.ones(bags, dtype=torch.int64), torch.arange(bags + 1)


@dataclass(frozen=True)
class Piece:
    """Rows ``[first, last)`` of a block."""

    block: Block
    first: int
    last: int


def make_batch(pieces: Sequence[Piece], keys: list[str], id_memory: ReusedMemory) -> Batch:
    """A batch of the rows of the pieces, in their order."""
    rows = sum(piece.last - piece.first for piece in pieces)
    first = pieces[0]
    weights = None
    if first.block.weights is not None:
        weights = _rows(
            [piece.block.weights[piece.first : piece.last] for piece in pieces if piece.block.weights is not None]
        )
    return Batch(
        dense=_rows([piece.block.dense[:, piece.first : piece.last] for piece in pieces]).t(),
        sparse=_make_ids(pieces, keys, rows, id_memory),
        labels=_rows([piece.block.labels[piece.first : piece.last] for piece in pieces]),
        weights=weights,
        origin=first.block.origin(first.first),
    )


def _rows(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1))


def _make_ids(pieces: Sequence[Piece], keys: list[str], rows: int, id_memory: ReusedMemory) -> KeyedJaggedTensor:
    sources: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    weighted = any(bags.weights is not None for bags in pieces[0].block.sparse)
    single = all(bags.offsets is None for piece in pieces for bags in piece.block.sparse)
    lengths_array = None if single else np.ones(len(keys) * rows, np.int64)
    bag = 0
    for feature in range(len(keys)):
        for piece in pieces:
            bags = piece.block.sparse[feature]
            first, last = piece.first, piece.last
            if bags.offsets is not None:
                assert lengths_array is not None
                offsets = bags.offsets[first : last + 1]
                np.subtract(offsets[1:], offsets[:-1], out=lengths_array[bag : bag + last - first])
                first, last = int(offsets[0]), int(offsets[-1])
            bag += piece.last - piece.first
            sources.append(bags.values[first:last])
            if weighted:
                weights.append(np.ones(last - first, np.float32) if bags.weights is None else bags.weights[first:last])
    values = id_memory.take(sum(len(source) for source in sources))
    if sources:
        np.concatenate(sources, out=values)
    if lengths_array is None:
        lengths, offsets_tensor = _one_id_per_bag(len(keys) * rows)
    else:
        lengths = torch.from_numpy(lengths_array)
        offsets_tensor = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths_array)]))
    return KeyedJaggedTensor(
        keys,
        torch.from_numpy(values),
        torch.from_numpy(np.concatenate(weights)) if weights else None,
        lengths=lengths,
        offsets=offsets_tensor,
        stride=rows,
    )
