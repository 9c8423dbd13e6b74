"""Batches of a generated click log like Criteo's, kept in memory or read from Parquet while training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.gpu.options import Options
from recsys_offload.data import Batch, DataSettings, Encoding, ParquetBatches
from recsys_offload.data.click_log import ClickLog
from recsys_offload.data.criteo import SCHEMAS, SPARSE_COLUMNS, SPARSE_NAMES
from recsys_offload.data.synthetic import GENERATOR_FILE, data_settings, write

FILES = 8
ROW_GROUP_ROWS = 65536


def table_configs(options: Options) -> list[EmbeddingBagConfig]:
    """One table of ``options.rows`` rows for each categorical column."""
    return [
        EmbeddingBagConfig(name=name, embedding_dim=options.dim, num_embeddings=options.rows, feature_names=[name])
        for name in SPARSE_NAMES
    ]


def _folder(log: ClickLog, data: Path, examples: int) -> Path:
    """The folder of the data set, made first where it is absent or was made otherwise."""
    folder = data / f"gpu-{log.schema.cardinalities[0]}-{examples}"
    wanted = {**asdict(log), "rows": examples, "files": FILES, "row_group_rows": ROW_GROUP_ROWS}
    try:
        found = json.loads((folder / GENERATOR_FILE).read_text())
    except FileNotFoundError:
        found = {}
    if {name: found.get(name) for name in wanted} != json.loads(json.dumps(wanted)):
        shutil.rmtree(folder, ignore_errors=True)
        write(log, folder, examples, FILES, ROW_GROUP_ROWS, on_rows=lambda rows: None)
    return folder


def _own_copy(batch: Batch, device: torch.device) -> Batch:
    """The batch in memory of its own: the reader uses its memory again. The ids stay on the host."""
    sparse = KeyedJaggedTensor(
        batch.sparse.keys(),
        batch.sparse.values().clone(),
        lengths=batch.sparse.lengths().clone(),
        offsets=batch.sparse.offsets().clone(),
    )
    return Batch(batch.dense.clone().to(device), sparse, batch.labels.clone().to(device))


class ClickBatches:
    """The batches that caches are warmed with, and those that are trained on, which begin behind them.

    Attributes:
        warming: the ids of the former.
    """

    def __init__(self, options: Options, folder: Path, count: int, device: torch.device) -> None:
        """Args:
        options: the tables' sizes, the batches' and where they come from.
        folder: for the data set.
        count: batches to train on, at least.
        device: for the dense columns and the labels, where batches are kept in memory.
        """
        schema = replace(SCHEMAS["criteo-kaggle"], cardinalities=(options.rows,) * SPARSE_COLUMNS)
        log = ClickLog(schema, skew=options.skew)
        examples = (options.warm_batches + count) * options.batch_size
        files = _folder(log, folder, examples) / "*.parquet"
        settings = DataSettings(**data_settings(schema, str(files)))
        self._reader = ParquetBatches(settings, Encoding.fit(settings), "all", options.batch_size, drop_last=True)
        self._stream = self._read_on()
        self.warming = [_own_copy(batch, torch.device("cpu")).sparse for batch in self._read(options.warm_batches)]
        self._kept: list[Batch] | None = None
        if options.source == "memory":
            self._kept = [_own_copy(batch, device) for batch in self._read(count)]

    def _read_on(self) -> Iterator[Batch]:
        while True:
            yield from self._reader

    def _read(self, count: int) -> Iterator[Batch]:
        yield from islice(self._stream, count)

    def block(self, first: int, count: int) -> Iterable[Batch]:
        """Batches ``first`` and on from memory, from the beginning again at their end; or the next ones of the file."""
        if self._kept is None:
            return self._read(count)
        return [self._kept[number % len(self._kept)] for number in range(first, first + count)]

    def close(self) -> None:
        """Ends the reader's threads."""
        self._stream.close()  # type: ignore[attr-defined]
        self._reader.close()
