"""Metrics of a trained model: ``python -m recsys_offload.evaluate RUN_OR_CHECKPOINT [--data PATHS] [--part PART]``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recsys_offload.data import DataSettings, ParquetBatches
from recsys_offload.data.config import Part
from recsys_offload.device import choose_device
from recsys_offload.inference import TrainedModel, load_model
from recsys_offload.metrics import evaluate_batches

__all__ = ["evaluate", "main"]


def evaluate(
    trained: TrainedModel, part: Part, *, data: Sequence[str] | None = None, batch_size: int | None = None
) -> dict[str, float]:
    """The metrics of a model on a part of its run's data, or of other files.

    Args:
        part: ``train``, ``validation``, ``test`` or ``all``.
        data: other Parquet files, directories or globs, divided into parts as the run's training files are.
        batch_size: examples per batch; by default the run's.

    Raises:
        ValueError: the data does not fit the run's settings, or the part is empty.
    """
    config = trained.config
    settings = config.data if data is None else other_files(config.data, data)
    size = trained.batch_size if batch_size is None else batch_size
    batches = ParquetBatches(settings, trained.encoding, part, size, seed=config.run.seed, shuffle=False)
    try:
        metrics = evaluate_batches(trained.model, batches, trained.device)
    finally:
        batches.close()
    if not metrics["examples"]:
        raise ValueError(f"the {part} part of {', '.join(settings.train)} has no examples")
    return metrics


def other_files(settings: DataSettings, paths: Sequence[str]) -> DataSettings:
    """The same columns and encodings, read from other files."""
    return settings.model_copy(update={"train": list(paths), "validation": [], "test": []})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recsys_offload.evaluate",
        description="Print the metrics of a trained model: a table on stderr, JSON on stdout.",
    )
    parser.add_argument("model", type=Path, help="a run folder (its best checkpoint is taken) or one checkpoint")
    parser.add_argument("--data", nargs="+", help="other Parquet files, directories or globs than the run's")
    parser.add_argument(
        "--part",
        choices=["train", "validation", "test", "all"],
        help="which part of the data; by default test, or all of the files given by --data",
    )
    parser.add_argument("--batch-size", type=int, help="examples per batch; by default the run's")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_args(arguments)
    part: Part = options.part or ("all" if options.data else "test")
    try:
        trained = load_model(options.model, choose_device(options.device))
        metrics = evaluate(trained, part, data=options.data, batch_size=options.batch_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"The {part} part with {trained.checkpoint}:", file=sys.stderr)
    _print_table(metrics)
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    print(json.dumps({"checkpoint": str(trained.checkpoint), "part": part, **finite}, indent=1))
    return 0


def _print_table(metrics: dict[str, float]) -> None:
    table = Table(show_header=False)
    for name, value in metrics.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.5f}")
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
