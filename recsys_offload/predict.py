"""Scores for Parquet files: ``python -m recsys_offload.predict RUN_OR_CHECKPOINT --data FILES --out FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys_offload.data import ParquetBatches
from recsys_offload.data.files import FileSet, RowGroup, open_files, read_row_group
from recsys_offload.device import choose_device
from recsys_offload.durable_files import durable_path
from recsys_offload.evaluate import other_files
from recsys_offload.inference import TrainedModel, load_model

__all__ = ["SCORE", "main", "predict"]

SCORE = "score"


def predict(
    trained: TrainedModel,
    data: Sequence[str],
    output: Path,
    *,
    columns: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> int:
    """Write the rows of Parquet files, in their order, with the column ``score``: the probability of a click, float32.

    Both sides are streamed, so memory does not grow with the files. ``output`` appears when it is complete.

    Args:
        data: files, directories or globs; a label column is not needed.
        columns: the columns of the input to copy; by default all.
        batch_size: rows per forward pass; by default the run's for evaluation.

    Returns:
        The number of rows.

    Raises:
        ValueError: the files do not fit the run's settings or each other, or a column is missing.
        OSError: ``output`` cannot be written.
    """
    files = open_files(data, [])
    if not output.parent.is_dir():
        raise FileNotFoundError(f"cannot write {output}: there is no folder {output.parent}")
    if output.resolve() in {group.path.resolve() for group in files.row_groups}:
        raise ValueError(f"{output} is one of the files to read: choose another name for the scores")
    schema = _output_schema(files, columns)
    size = trained.batch_size if batch_size is None else batch_size
    batches = ParquetBatches(
        other_files(trained.config.data, data), trained.encoding, "all", size, shuffle=False, require_label=False
    )
    scores = _Scores(trained, batches)
    try:
        with durable_path(output) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for group in files.row_groups:
                score = pa.array(scores.take(group.rows))
                writer.write_table(pa.table([*_copied(group, schema), score], schema))
    finally:
        batches.close()
    return files.rows


class _Scores:
    """The scores of a model over batches, handed out in pieces of any length."""

    def __init__(self, trained: TrainedModel, batches: ParquetBatches) -> None:
        self._scores = self._compute(trained, batches)
        self._rest = np.empty(0, np.float32)

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` scores, float32."""
        parts, missing = [self._rest], count - len(self._rest)
        while missing > 0:
            parts.append(next(self._scores))
            missing -= len(parts[-1])
        together = np.concatenate(parts)
        self._rest = together[count:]
        return together[:count]

    @staticmethod
    @torch.no_grad()
    def _compute(trained: TrainedModel, batches: ParquetBatches) -> Iterator[np.ndarray]:
        for batch in batches:
            moved = batch.to(trained.device)
            yield trained.model(moved.dense, moved.sparse).squeeze(1).float().sigmoid().cpu().numpy()


def _output_schema(files: FileSet, columns: Sequence[str] | None) -> pa.Schema:
    path, schema = files.row_groups[0].path, files.schema
    if columns is not None:
        for name in columns:
            if name not in schema.names:
                raise ValueError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}")
        schema = pa.schema([schema.field(name) for name in columns])
    if SCORE in schema.names:
        raise ValueError(f"{path} already has a column {SCORE!r}: name the columns to copy with --columns")
    return schema.append(pa.field(SCORE, pa.float32()))


def _copied(group: RowGroup, schema: pa.Schema) -> list[pa.ChunkedArray]:
    """The columns of ``schema`` but the score, from one row group."""
    fields = [field for field in schema if field.name != SCORE]
    table = read_row_group(group, [field.name for field in fields])
    columns = []
    for field in fields:
        if field.name not in table.column_names or table.schema.field(field.name).type != field.type:
            raise ValueError(
                f"{group.path} has no column {field.name!r} of type {field.type}, as the first file has: "
                "name the columns to copy with --columns"
            )
        columns.append(table[field.name])
    return columns


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recsys_offload.predict", description="Write Parquet rows with their scores."
    )
    parser.add_argument("model", type=Path, help="a run folder (its best checkpoint is taken) or one checkpoint")
    parser.add_argument("--data", nargs="+", required=True, help="Parquet files, directories or globs to score")
    parser.add_argument("--out", type=Path, required=True, help="the Parquet file to write")
    parser.add_argument("--columns", nargs="*", help="the columns of the input to copy; by default all")
    parser.add_argument("--batch-size", type=int, help="rows per forward pass; by default the run's")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_args(arguments)
    try:
        trained = load_model(options.model, choose_device(options.device))
        rows = predict(trained, options.data, options.out, columns=options.columns, batch_size=options.batch_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{rows:,} rows with scores: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
