"""What a run came to: a table on the terminal, summary.json and curves.png."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from recsys_offload.durable_files import durable_file, write_json
from recsys_offload.metrics import METRICS
from recsys_offload.progress import format_duration

__all__ = ["Summary", "plot_curves", "print_summary", "write_summary"]


@dataclass(frozen=True)
class Summary:
    """The outcome of a run.

    Attributes:
        reason: why training ended.
        steps: how many steps were trained.
        epochs: how many epochs were completed.
        best_step: the step of the evaluation that was the best; None without a validation part.
        best_checkpoint: the checkpoint of that step, or the last one; relative to the run folder.
        validation: the metrics of the best evaluation; None without a validation part.
        test: the metrics of the best checkpoint on the test part; None without one.
        training_seconds: time spent in training steps, evaluations and checkpoints.
        examples: training examples seen, repeated ones included.
        cache: what the embedding cache did (``embedding/statistics.py``); None where no table is cached.
    """

    reason: str
    steps: int
    epochs: int
    best_step: int | None
    best_checkpoint: str
    validation: Mapping[str, float] | None
    test: Mapping[str, float] | None
    training_seconds: float
    examples: int
    cache: Mapping[str, float] | None = None


def write_summary(summary: Summary, records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write ``summary.json``, and ``curves.png`` from the ``records`` of metrics.jsonl, into ``folder``."""
    content = asdict(summary)
    for part in ("validation", "test"):
        if content[part] is not None:  # JSON has no NaN
            content[part] = {key: value if math.isfinite(value) else None for key, value in content[part].items()}
    write_json(folder / "summary.json", content)
    figure = plot_curves(records, summary.best_step)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    with durable_file(folder / "curves.png") as file:
        file.write(image.getvalue())


def plot_curves(records: Sequence[Mapping[str, Any]], best_step: int | None) -> Figure:
    """The training loss, and each validation metric, over the steps."""
    shown = [metric for metric in METRICS if _series(records, "validation", metric)[0]]
    count = 1 + len([metric for metric in shown if metric != "log_loss"])
    figure = Figure(figsize=(5.0 * count, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    axes[0].plot(*_series(records, "train", "loss"), label="training loss")
    if "log_loss" in shown:
        axes[0].plot(*_series(records, "validation", "log_loss"), "o-", label="validation log loss")
    axes[0].set_title("loss")
    for axis, metric in zip(axes[1:], [metric for metric in shown if metric != "log_loss"], strict=True):
        axis.plot(*_series(records, "validation", metric), "o-", label=f"validation {metric.replace('_', ' ')}")
        axis.set_title(metric.replace("_", " "))
    for axis in axes:
        if best_step is not None:
            axis.axvline(best_step, color="grey", linestyle=":", label="best evaluation")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    return figure


def print_summary(summary: Summary, folder: Path, console: Console) -> None:
    """Print the outcome."""
    table = Table(title=f"{summary.reason}: {summary.steps:,} steps, {summary.epochs} epochs", title_justify="left")
    table.add_column("metric")
    parts = {"validation": summary.validation, "test": summary.test}
    given = {name: metrics for name, metrics in parts.items() if metrics is not None}
    for name in given:
        table.add_column(name, justify="right")
    for metric in (*METRICS, "examples"):
        table.add_row(metric.replace("_", " "), *(_text(metrics[metric]) for metrics in given.values()))
    if given:
        console.print(table)
    if summary.best_step is not None:
        console.print(f"The best evaluation was that of step {summary.best_step:,}.", highlight=False)
    seconds = summary.training_seconds
    rate = summary.examples / seconds if seconds else 0.0
    console.print(f"Trained for {format_duration(seconds)} at {rate:,.0f} examples/s overall.", highlight=False)
    if summary.cache is not None:
        cache = summary.cache
        moved = (cache["fetched_bytes"] + cache["written_back_bytes"]) / 2**20
        console.print(
            f"Embedding cache: {cache['hit_rate']:.1%} hits, {moved:,.0f} MiB moved, training waited "
            f"{cache['stalled_seconds']:.2f} s for rows.",
            highlight=False,
        )
    console.print(f"Run folder: {folder}", highlight=False, markup=False, soft_wrap=True)


def _series(records: Sequence[Mapping[str, Any]], kind: str, key: str) -> tuple[list[int], list[float]]:
    points = [(item["step"], item[key]) for item in records if item["kind"] == kind and item.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _text(value: float) -> str:
    if math.isnan(value):
        return "undefined"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5f}"
