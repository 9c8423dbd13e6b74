"""The rows that each batch of a data set uses: all that a cache's hit rate depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.config import Config
from recsys_offload.data import Encoding, ParquetBatches
from recsys_offload.data.arrays import is_list, one_array, plain
from recsys_offload.data.files import open_files, read_row_group
from recsys_offload.embedding import EmbeddingSettings
from recsys_offload.memory.kernels import append_distinct
from recsys_offload.models import table_configs

__all__ = ["Trace", "make_trace", "trace_of_columns", "trace_of_training"]


@dataclass(frozen=True)
class Trace:
    """The distinct rows of each batch. The tables lie one below the other, their rows numbered through.

    Attributes:
        rows: int64 ``[N]``: of batch after batch, each batch's by table, as they first occur.
        starts: int64 ``[B + 1]``: where each batch's rows begin.
        row_count: rows of all tables.
        names: of the tables.
    """

    rows: np.ndarray
    starts: np.ndarray
    row_count: int
    names: list[str]

    def __len__(self) -> int:
        """The number of batches."""
        return len(self.starts) - 1

    def batch(self, number: int) -> np.ndarray:
        """The distinct rows of a batch, int64 ``[n]``."""
        return self.rows[self.starts[number] : self.starts[number + 1]]

    @property
    def largest_batch(self) -> int:
        """How many rows the batch with most of them has."""
        return int(np.diff(self.starts).max())


def make_trace(batches: Iterable[np.ndarray], row_count: int, names: list[str]) -> Trace:
    """The trace of batches, each given by its rows (int64 ``[n]``, which may repeat). One without rows is left out.

    Raises:
        ValueError: no batch has rows.
    """
    last_number = np.full(row_count, -1, np.int32)
    parts: list[np.ndarray] = []
    for rows in batches:
        distinct = np.empty(len(rows), np.int64)
        count = append_distinct(rows, len(parts), last_number, distinct)
        if count:
            parts.append(distinct[:count].copy())
    if not parts:
        raise ValueError(f"no row has an id: {', '.join(names)} hold only nulls and empty lists")
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return Trace(np.concatenate(parts), starts, row_count, names)


def trace_of_training(config: Config, epochs: int = 1, row_limit: int | None = None) -> Trace:
    """What training as ``config`` says reads: its training part, shuffled, in its batches.

    Args:
        config: of the run. All tables share one cache, whatever their placements.
        epochs: to read.
        row_limit: the batch that reaches so many examples is the last.

    Raises:
        ValueError: the settings do not fit the data, or an id has no row.
        FileNotFoundError: there is no such data.
    """
    if not config.data.sparse:
        raise ValueError("data.sparse names no feature: without ids there is nothing to cache")
    tables = table_configs(config.data, config.model.embedding_dim)
    batches = ParquetBatches(
        config.data,
        Encoding.fit(config.data),
        "train",
        config.train.batch_size,
        seed=config.run.seed,
        shuffle=True,
        require_label=False,
    )
    wanted = batches.steps_per_epoch * epochs
    if row_limit is not None:
        wanted = min(wanted, -(-row_limit // config.train.batch_size))
    all_batches = (batch.sparse for _ in range(epochs) for batch in batches)
    try:
        return make_trace(
            (_table_rows(sparse, tables, config.embedding) for sparse in islice(all_batches, wanted)),
            sum(table.num_embeddings for table in tables),
            [table.name for table in tables],
        )
    finally:
        batches.close()


def _table_rows(
    sparse: KeyedJaggedTensor, tables: Sequence[EmbeddingBagConfig], settings: EmbeddingSettings
) -> np.ndarray:
    """The rows that a batch reads, int64 ``[n]``, by table."""
    parts, base = [], 0
    for table in tables:
        for feature in table.feature_names:
            ids = sparse[feature].values().numpy().astype(np.int64)
            wrong = (ids < 0) | (ids >= table.num_embeddings)
            if settings.invalid_ids == "modulo":
                ids = ids % table.num_embeddings
            elif settings.invalid_ids == "fallback":
                ids = np.where(wrong, settings.fallback_row, ids)
            elif wrong.any():
                raise ValueError(
                    f"feature {feature!r}: id {ids[wrong][0]} is outside [0, {table.num_embeddings}). Give the table "
                    f"more rows with --data.sparse.{feature}.num_embeddings, or set --embedding.invalid_ids modulo"
                )
            parts.append(ids + base)
        base += table.num_embeddings
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Column:
    """A column whose values are rows of a table of its own; ``ids`` is an Arrow array of integers or of lists."""

    ids: pa.Array
    row_count: int

    def bags(self, order: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The ids that are not null, int64 ``[N]``, and where each example's begin, int64 ``[examples + 1]``."""
        array = self.ids if order is None else self.ids.take(pa.array(order))
        if is_list(array.type):
            lengths = pc.list_value_length(array).fill_null(0).to_numpy()
            values = array.flatten()
        else:
            lengths, values = np.ones(len(array), np.int64), array
        present = values.is_valid().to_numpy(zero_copy_only=False)
        kept = np.concatenate([[0], np.cumsum(present)])
        starts = kept[np.concatenate([[0], np.cumsum(lengths)])]
        return values.drop_null().to_numpy(zero_copy_only=False).astype(np.int64), starts


def trace_of_columns(
    paths: Sequence[str],
    columns: Sequence[str],
    batch_size: int,
    epochs: int = 1,
    row_limit: int | None = None,
    shuffle_seed: int | None = None,
) -> Trace:
    """What training on columns of Parquet files would read, each a table with one row for each distinct value.

    Args:
        paths: files, directories or globs.
        columns: of integers, strings, or lists of these; nulls are no ids.
        batch_size: rows of the files per batch.
        epochs: to read.
        row_limit: the rows of the files to read, from the first on.
        shuffle_seed: shuffles every epoch anew; None keeps the order of the files.

    Raises:
        ValueError: a file or column cannot be read so; the message names it.
        FileNotFoundError: a path stands for no file.
    """
    encoded = _read_columns(paths, columns, row_limit)
    examples = len(next(iter(encoded.values())).ids)

    def batches() -> Iterator[np.ndarray]:
        for epoch in range(epochs):
            order = None if shuffle_seed is None else np.random.default_rng([shuffle_seed, epoch]).permutation(examples)
            parts, base = [], 0
            for column in encoded.values():
                ids, starts = column.bags(order)
                parts.append((ids + base, starts))
                base += column.row_count
            for first in range(0, examples, batch_size):
                last = min(first + batch_size, examples)
                yield np.concatenate([ids[starts[first] : starts[last]] for ids, starts in parts])

    return make_trace(batches(), sum(column.row_count for column in encoded.values()), list(encoded))


def _read_columns(paths: Sequence[str], columns: Sequence[str], row_limit: int | None) -> dict[str, _Column]:
    files = open_files(paths, columns)
    first_path = files.row_groups[0].path
    for name in columns:
        kind = files.schema.field(name).type
        kind = kind.value_type if is_list(kind) else kind
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(
                f"{first_path}: column {name!r} is {files.schema.field(name).type}, but ids are integers, strings, or "
                "lists of these; leave it out of --columns, or write it as one of these"
            )
    tables, rows = [], 0
    for group in files.row_groups:
        if row_limit is not None and rows >= row_limit:
            break
        tables.append(read_row_group(group, columns))
        rows += group.rows
    table = pa.concat_tables([part.select(list(columns)) for part in tables])
    if row_limit is not None:
        table = table.slice(0, row_limit)
    return {name: _number(one_array(table[name].combine_chunks())) for name in columns}


def _number(array: pa.Array) -> _Column:
    """Numbers the distinct values, in the order in which they first occur."""
    if not is_list(array.type):
        encoded = plain(array).dictionary_encode()
        return _Column(encoded.indices, len(encoded.dictionary))
    encoded = plain(array.flatten()).dictionary_encode()
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(array).fill_null(0).to_numpy())])
    return _Column(pa.LargeListArray.from_arrays(pa.array(offsets), encoded.indices), len(encoded.dictionary))
