"""Row groups decoded and converted ahead of their use, in order, on several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recsys_offload.data.block import Block
from recsys_offload.data.config import PARTS, DataSettings, Part, TimeSplit
from recsys_offload.data.convert import bags, dense_columns, labels, sample_weights
from recsys_offload.data.encoding import Encoding, wanted_columns
from recsys_offload.data.files import RowGroup, Source, read_row_group
from recsys_offload.data.split import parts_of_rows, split_columns
from recsys_offload.data.vocabulary import VocabularyRows


@dataclass(frozen=True)
class Slice:
    """Rows ``[first, last)`` of a row group."""

    group: RowGroup
    first: int
    last: int


def _check_fitted(settings: DataSettings, encoding: Encoding) -> None:
    needed = [name for name, feature in settings.dense.items() if feature.transform == "standardize"]
    missing = [name for name in needed if name not in encoding.moments]
    needed = [name for name, feature in settings.sparse.items() if feature.encoding == "vocabulary"]
    missing += [name for name in needed if name not in encoding.vocabularies]
    if isinstance(settings.split, TimeSplit) and encoding.times is None:
        missing.append("split")
    if missing:
        raise ValueError(f"the encoding was fitted with other settings: it has nothing for {', '.join(missing)}")


class RowGroupDecoder:
    """Decodes a slice of a row group and converts its rows of one part."""

    def __init__(self, settings: DataSettings, encoding: Encoding, part: Part, require_label: bool) -> None:
        self._settings = settings
        self._encoding = encoding
        self._require_label = require_label
        _check_fitted(settings, encoding)
        own_files = (
            part == "all" or (part == "validation" and settings.validation) or (part == "test" and settings.test)
        )
        self._split = None if own_files else settings.split
        self._part = PARTS.index(part) if self._split is not None else None
        self._wanted = wanted_columns(settings, require_label)
        self._vocabularies = {
            name: VocabularyRows(encoding.vocabularies[name])
            for name, feature in settings.sparse.items()
            if feature.encoding == "vocabulary"
        }
        self.columns = list(self._wanted)
        if self._split is not None:
            self.columns += [name for name in split_columns(self._split) if name not in self._wanted]

    @property
    def splits(self) -> bool:
        """Whether the part is cut from the files, which hold other parts too."""
        return self._split is not None

    def __call__(self, piece: Slice) -> Block:
        """Raises ValueError where the file is damaged or a value is not as the settings say."""
        settings, group = self._settings, piece.group
        table = read_row_group(group, self.columns)
        rows = group.row_numbers
        if self._split is not None:
            kept = parts_of_rows(self._split, group, table, self._encoding.times) == self._part
            kept[: piece.first] = False
            kept[piece.last :] = False
            if not kept.all():
                table, rows = table.select(self._wanted).filter(pa.array(kept)), rows[kept]
        elif piece.last - piece.first < group.rows:
            table = table.slice(piece.first, piece.last - piece.first)
            rows = rows[piece.first : piece.last]
        source = Source(group.path, rows)
        weights = None
        if settings.sample_weight is not None and self._require_label:
            weights = sample_weights(table, settings.sample_weight, source)
        return Block(
            dense=dense_columns(table, settings.dense, self._encoding.moments, source),
            sparse=[
                bags(table, name, feature, self._vocabularies.get(name), settings.hash_seed, source)
                for name, feature in settings.sparse.items()
            ],
            labels=labels(table, settings.label, source) if self._require_label else np.empty(0, np.float32),
            weights=weights,
            sources=rows,
            paths=[str(group.path)],
        )


def decode_ahead(
    decode: Callable[[Slice], Block], slices: Sequence[Slice], threads: int, read_ahead: int
) -> Iterator[Block]:
    """The blocks of ``slices`` in order, at most ``read_ahead`` of them in flight at a time.

    Whatever ends the iteration, no thread is left behind.
    """
    pool = ThreadPoolExecutor(threads, "decode")
    pending: deque[Future[Block]] = deque()
    waiting = iter(slices)
    try:
        for piece in waiting:
            pending.append(pool.submit(decode, piece))
            if len(pending) >= read_ahead:
                break
        while pending:
            block = pending.popleft().result()
            following = next(waiting, None)
            if following is not None:
                pending.append(pool.submit(decode, following))
            yield block
            del block  # or the next result is waited for with this one still in memory
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
