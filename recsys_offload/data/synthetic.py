"""Writes click logs shaped like Criteo's, of any size, with clicks that a model can learn to predict.

    python -m recsys_offload.data.synthetic --schema criteo-kaggle --rows 1000000 --scale 0.1 --out data/criteo-like

The folder gets Parquet files, `dataset.yaml` (settings to train on it) and `generator.json` (how it was made, and the
AUC of the model that made the clicks, which no model can beat by more than chance).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console
from rich.progress import Progress

from recsys_offload.data.click_log import ClickLog, OptimalModel
from recsys_offload.data.criteo import DENSE_NAMES, LABEL, SCHEMAS, SPARSE_COLUMNS, SPARSE_NAMES, Schema

DATASET_FILE = "dataset.yaml"
GENERATOR_FILE = "generator.json"
# Columns of more distinct ids gain nothing from Parquet's dictionaries.
DICTIONARY_MAX_IDS = 4096
# A row group of the default size holds about so many ids; all that is in memory at once is a few row groups.
IDS_PER_ROW_GROUP = 8_000_000


def data_settings(schema: Schema, train: str) -> dict[str, Any]:
    """The `data` section of the trainer's settings for files of this schema.

    Args:
        schema: of the categorical columns.
        train: the files.
    """
    return {
        "train": train,
        "label": LABEL,
        "split": {"by": "hash", "shares": {"train": 0.9, "validation": 0.05, "test": 0.05}},
        "dense": {name: {"transform": "log1p", "fill": 0} for name in DENSE_NAMES},
        "sparse": {
            name: {"num_embeddings": size} for name, size in zip(SPARSE_NAMES, schema.cardinalities, strict=True)
        },
    }


def write(
    log: ClickLog, folder: Path, rows: int, files: int, row_group_rows: int, on_rows: Callable[[int], None]
) -> dict[str, Any]:
    """Writes a data set in memory for a few row groups, whatever its size. The folder appears when it is complete.

    Args:
        log: what to write.
        folder: must not exist.
        rows: in all.
        files: to spread the rows over, in order.
        row_group_rows: rows per row group.
        on_rows: called with the number of rows written, after each row group.

    Returns:
        the content of `GENERATOR_FILE`.

    Raises:
        FileExistsError: the folder exists.
        ValueError: a number is out of range.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: remove it or name another folder with --out")
    for name, number in (("rows", rows), ("files", files), ("row_group_rows", row_group_rows)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if files > rows:
        raise ValueError(f"{rows} rows cannot be spread over {files} files")
    partial_folder = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    try:
        optimum = _write_files(log, partial_folder, list(_row_groups(rows, files, row_group_rows)), on_rows)
        report = {**asdict(log), "rows": rows, "files": files, "row_group_rows": row_group_rows}
        report |= {"base_rate": optimum.base_rate, "optimal_auc": optimum.auc}
        settings = {"data": data_settings(log.schema, str(folder / "*.parquet"))}
        text = f"# python -m recsys_offload.train {folder / DATASET_FILE}\n{yaml.safe_dump(settings, sort_keys=False)}"
        (partial_folder / DATASET_FILE).write_text(text)
        (partial_folder / GENERATOR_FILE).write_text(json.dumps(report, indent=1) + "\n")
        partial_folder.rename(folder)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return report


def _row_groups(rows: int, files: int, row_group_rows: int) -> Iterator[tuple[int, int, int]]:
    """(file, first row, rows) of each row group."""
    for file in range(files):
        first, end = rows * file // files, rows * (file + 1) // files
        for row in range(first, end, row_group_rows):
            yield file, row, min(row_group_rows, end - row)


def _chunks(
    log: ClickLog, groups: list[tuple[int, int, int]], pool: ThreadPoolExecutor
) -> Iterator[tuple[int, pa.RecordBatch, np.ndarray]]:
    """(file, rows, probabilities) of each row group; the next one is being made while the caller has this one."""
    ahead = log.start(pool, *groups[0][1:])
    for (file, first_row, _), following in itertools.zip_longest(groups, groups[1:]):
        batch, probability = log.finish(ahead, first_row)
        ahead = log.start(pool, *following[1:]) if following else []
        yield file, batch, probability


def _write_files(
    log: ClickLog, folder: Path, groups: list[tuple[int, int, int]], on_rows: Callable[[int], None]
) -> OptimalModel:
    sizes = dict(zip(SPARSE_NAMES, log.schema.cardinalities, strict=True))
    dictionaries = [LABEL, *(name for name, size in sizes.items() if size <= DICTIONARY_MAX_IDS)]
    optimum = OptimalModel()
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "generate")
    try:
        for file, chunks in itertools.groupby(_chunks(log, groups, pool), key=lambda chunk: chunk[0]):
            with (folder / f"part-{file:05d}.parquet").open("wb") as sink:
                with pq.ParquetWriter(
                    sink, log.arrow_schema, compression="zstd", use_dictionary=dictionaries
                ) as writer:
                    for _, batch, probability in chunks:
                        writer.write_batch(batch, row_group_size=batch.num_rows)
                        optimum.add(probability, batch.column(LABEL).to_numpy())
                        on_rows(batch.num_rows)
                sink.flush()
                os.fsync(sink.fileno())
    finally:
        pool.shutdown(cancel_futures=True)
    return optimum


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_offload.data.synthetic",
        description="Write a click log shaped like Criteo's, with clicks that a model can learn to predict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder to make", default=argparse.SUPPRESS)
    add("--schema", choices=list(SCHEMAS), default="criteo-kaggle", help="whose columns and numbers of ids")
    add("--rows", type=int, default=1_000_000, help="examples in all")
    add("--scale", type=float, default=1.0, help="factor on the numbers of ids; columns of up to 1000 never shrink")
    add("--cardinality", type=int, help="the same number of ids for every column, instead of the schema's")
    add("--files", type=int, default=4, help="Parquet files")
    add(
        "--row-group-rows",
        type=int,
        help="rows per row group; by default so many that they hold 8 million ids, at most 262144",
    )
    add("--skew", type=float, default=1.05, help="exponent of the Zipf law of the ids; 0 is uniform")
    add("--null-rate", type=float, default=0.05, help="share of nulls in each column")
    add("--id-order", choices=["scattered", "frequency"], default="scattered", help="where in a table hot ids lie")
    add("--seed", type=int, default=0, help="of everything")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = _parse(arguments)
    try:
        schema = SCHEMAS[options.schema].scaled(options.scale)
        if options.cardinality is not None:
            schema = replace(schema, cardinalities=(options.cardinality,) * SPARSE_COLUMNS)
        log = ClickLog(schema, options.skew, options.null_rate, options.id_order == "scattered", options.seed)
        row_group_rows = options.row_group_rows
        if row_group_rows is None:
            row_group_rows = min(262144, IDS_PER_ROW_GROUP // sum(schema.hotness))
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("rows", total=options.rows)
            report = write(
                log, options.out, options.rows, options.files, row_group_rows,
                lambda rows: progress.advance(task, rows),
            )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left in the output folder")
    print(f"Wrote {options.rows:,} rows to {options.out}: {report['base_rate']:.1%} clicks, ", end="")
    auc = report["optimal_auc"]
    print("one label only" if auc is None else f"optimal AUC {auc:.4f}", end=".\n")
    print(f"Train on it: python -m recsys_offload.train {options.out / DATASET_FILE}")


if __name__ == "__main__":
    main()
