"""Batches of a part of the data, epoch by epoch, from any position on."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from recsys_offload.data.background import BackgroundIterator
from recsys_offload.data.batch import Batch
from recsys_offload.data.block import Block, Piece, concatenate, make_batch, permute
from recsys_offload.data.config import DataSettings, Part
from recsys_offload.data.encoding import Encoding
from recsys_offload.data.files import FileSet, RowGroup, open_files
from recsys_offload.data.reader import RowGroupDecoder, Slice, decode_ahead
from recsys_offload.reused_memory import ReusedMemory

# Batches that wait, ready, for the consumer.
BATCHES_AHEAD = 4
# Those, one that is being made, and the last few, which the consumer may still hold.
BATCHES_IN_USE = BATCHES_AHEAD + 4

Position = tuple[int, int]
"""Where a batch begins: the place in the epoch's order of the first row group of its buffer, and a row in that."""


def _buffer(gathered: list[Block], order: np.ndarray | None) -> Block:
    """The gathered rows, in ``order`` where there is one; empties the list."""
    joined = concatenate(gathered)
    gathered.clear()
    return joined if order is None else permute(joined, order)


class ParquetBatches:
    """Iterates over the batches of one part; each ``for`` loop is one epoch.

    After a loop has ended, ``epoch`` has moved on by one, and the next loop has another order if ``shuffle`` is on.
    The order depends on the seed and the epoch only, not on threads or on how far is read ahead. With several ranks
    every row is read by exactly one of them, and each gets as many as the others, plus or minus one before the split.
    A loop that was left early goes on, the next time, with the batch after the last one that it handed out.
    """

    def __init__(
        self,
        settings: DataSettings,
        encoding: Encoding,
        part: Part,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        require_label: bool = True,
    ) -> None:
        """Args:
            settings: which files, and what their columns mean.
            encoding: fitted to the training part.
            part: to read; ``all`` reads every row of the train files.
            batch_size: rows per batch; the last batch of an epoch may have fewer.
            seed: of the order, with ``shuffle``.
            rank: of this process, below ``world_size``.
            world_size: how many processes share the rows.
            shuffle: whether to shuffle, as ``settings.shuffle`` says.
            drop_last: leave out a last batch that is smaller.
            require_label: whether the label and the sample weight are read.

        Raises:
            FileNotFoundError: a path stands for no file.
            ValueError: a file or column is not as the settings say, or the part is empty.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not below world_size {world_size}")
        self._settings = settings
        self._decode = RowGroupDecoder(settings, encoding, part, require_label)
        own = {"train": settings.train, "validation": settings.validation, "test": settings.test}.get(part)
        self._files: FileSet = open_files(own or settings.train, self._decode.columns)
        whole = part == "all" or (own and not self._decode.splits)
        self._rows = self._files.rows if whole else encoding.rows.get(part, 0)
        if self._rows == 0:
            raise ValueError(f"the {part} part is empty: check data.split, or give data.{part} files of its own")
        self._batch_size = batch_size
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._shuffle, self._drop_last = shuffle, drop_last
        self._keys = list(settings.sparse)
        self._threads = settings.threads or min(len(os.sched_getaffinity(0)), settings.read_ahead)
        self._position: Position = (0, 0)
        self._running: BackgroundIterator[tuple[Batch, Position]] | None = None
        self.epoch = 0

    @property
    def rows(self) -> int:
        """Rows of the part, over all ranks."""
        return self._rows

    @property
    def steps_per_epoch(self) -> int:
        """Batches of this rank per epoch; with several ranks and a split, right to within the luck of the split."""
        begin, end = self._bounds(self._rows)
        rows = end - begin
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position of the batch that comes after the last one handed out. Holds plain numbers only."""
        group, row = self._position
        return {"epoch": self.epoch, "group": group, "row": row, "files": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position that ``state_dict`` gave; the next loop begins with exactly that batch.

        Raises:
            ValueError: the files, or what decides their order, are not those that the position was taken in.
        """
        if state["files"] != self._fingerprint():
            raise ValueError(
                "the data has changed since the position was saved (other files, row groups, split, shuffling, seed or "
                "ranks): a run can only go on with what it began with"
            )
        self.close()
        self.epoch, self._position = int(state["epoch"]), (int(state["group"]), int(state["row"]))

    def _fingerprint(self) -> int:
        sizes = [(group.path.name, group.index, group.rows) for group in self._files.row_groups]
        order = (self._seed, self._settings.shuffle) if self._shuffle else None
        split = self._settings.split if self._decode.splits else None
        return zlib.crc32(repr((sizes, self._rows, split, order, self._rank, self._world_size)).encode())

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        running = BackgroundIterator(self._batches(self.epoch, self._position), BATCHES_AHEAD, "batches")
        self._running = running
        try:
            for batch, following in running:
                self._position = following
                yield batch
            if self._running is running:
                self.epoch, self._position = self.epoch + 1, (0, 0)
        finally:
            running.close()

    def close(self) -> None:
        """Ends a loop that is under way, and its threads. The position stays."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _bounds(self, rows: int) -> tuple[int, int]:
        """The first of this rank's rows, and the end of them."""
        return rows * self._rank // self._world_size, rows * (self._rank + 1) // self._world_size

    def _random(self, epoch: int, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, epoch, *purpose])

    def _order(self, epoch: int) -> list[Slice]:
        """The row groups of an epoch in their order, cut to this rank's share."""
        groups = self._files.row_groups
        shuffle = self._settings.shuffle
        if self._shuffle:
            random = self._random(epoch, 0)
            if shuffle.files and shuffle.row_groups:
                groups = [groups[index] for index in random.permutation(len(groups))]
            elif shuffle.files or shuffle.row_groups:
                by_file: dict[str, list[RowGroup]] = {}
                for group in groups:
                    by_file.setdefault(str(group.path), []).append(group)
                files = list(by_file.values())
                if shuffle.files:
                    files = [files[index] for index in random.permutation(len(files))]
                else:
                    files = [[file[index] for index in random.permutation(len(file))] for file in files]
                groups = [group for file in files for group in file]
        begin, end = self._bounds(self._files.rows)
        slices, before = [], 0
        for group in groups:
            first, last = max(begin - before, 0), min(end - before, group.rows)
            if first < last:
                slices.append(Slice(group, first, last))
            before += group.rows
        return slices

    def _buffers(self, epoch: int, first_group: int) -> Iterator[tuple[int, int, Block]]:
        """Shuffled buffers of whole row groups: the place of their first group, that of the next buffer's, the rows."""
        slices = self._order(epoch)
        wanted = self._settings.shuffle.buffer_rows if self._shuffle else 0
        gathered: list[Block] = []
        rows, start = 0, first_group
        blocks = decode_ahead(self._decode, slices[first_group:], self._threads, self._settings.read_ahead)
        try:
            for place, block in enumerate(blocks, first_group):
                gathered.append(block)
                rows += len(block)
                if rows < wanted and place + 1 < len(slices):
                    continue
                order = self._random(epoch, 1, start).permutation(rows) if wanted else None
                # No name is kept for the buffer, which would hold its memory while the next one is made.
                yield start, place + 1, _buffer(gathered, order)
                rows, start = 0, place + 1
        finally:
            blocks.close()  # type: ignore[attr-defined]

    def _batches(self, epoch: int, position: Position) -> Iterator[tuple[Batch, Position]]:
        """The epoch's batches from ``position`` on, each with the position of the next."""
        first_group, row = position
        pieces: list[Piece] = []
        gathered = 0
        id_memory = ReusedMemory(np.int64, BATCHES_IN_USE)
        following: Position = position
        buffers: Iterator[tuple[int, int, Block]] = self._buffers(epoch, first_group)
        if self._shuffle:
            # A buffer takes far longer to fill and permute than a batch to train on.
            buffers = BackgroundIterator(buffers, 1, "shuffle")
        try:
            for start, next_start, buffer in buffers:
                while row < len(buffer):
                    last = min(row + self._batch_size - gathered, len(buffer))
                    pieces.append(Piece(buffer, row, last))
                    gathered += last - row
                    row = last
                    following = (start, row) if row < len(buffer) else (next_start, 0)
                    if gathered == self._batch_size:
                        yield make_batch(pieces, self._keys, id_memory), following
                        pieces, gathered = [], 0
                row = 0
            if pieces and not self._drop_last:
                yield make_batch(pieces, self._keys, id_memory), following
        finally:
            buffers.close()  # type: ignore[attr-defined]
