"""The summary: JSON, picture and table."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from recsys_offload.summary import Summary, plot_curves, print_summary, write_summary

METRICS = {"auc": 0.7, "log_loss": 0.65, "calibration": 1.1}
RECORDS: list[dict] = [
    {"kind": "train", "step": 1, "loss": 0.7},
    {"kind": "train", "step": 2, "loss": 0.6},
    {"kind": "validation", "step": 2, **METRICS, "normalized_entropy": None},
]


def _summary(**changes: object) -> Summary:
    values: dict = {
        "reason": "all epochs done",
        "steps": 2,
        "epochs": 1,
        "best_step": 2,
        "best_checkpoint": "checkpoints/step-000000002",
        "validation": {
            "auc": 0.7,
            "log_loss": 0.65,
            "normalized_entropy": math.nan,
            "calibration": 1.1,
            "examples": 1000,
        },
        "test": {"auc": 0.69, "log_loss": 0.66, "normalized_entropy": 0.9, "calibration": 1.0, "examples": 900},
        "training_seconds": 2.0,
        "examples": 5000,
    }
    return Summary(**{**values, **changes})


def test_it_is_written_as_json_and_png(tmp_path: Path) -> None:
    write_summary(_summary(), RECORDS, tmp_path)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["validation"]["normalized_entropy"] is None
    assert content["test"]["auc"] == 0.69 and content["best_checkpoint"] == "checkpoints/step-000000002"
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[1] > picture.shape[0] > 300
    assert picture[..., :3].min() < 0.2  # something is drawn


def test_the_curves_are_those_of_the_records() -> None:
    figure = plot_curves(RECORDS, best_step=2)
    assert [axis.get_title() for axis in figure.axes] == ["loss", "auc", "calibration"]
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([0.7, 0.6])
    assert figure.axes[1].lines[0].get_xdata() == pytest.approx([2])


def test_the_table_shows_what_there_is() -> None:
    stream = io.StringIO()
    print_summary(_summary(), Path("runs/x"), Console(file=stream, width=100))
    text = stream.getvalue()
    assert "0.69000" in text and "undefined" in text and "runs/x" in text and "2,500 examples/s" in text
    stream = io.StringIO()
    without = _summary(validation=None, test=None, best_step=None)
    print_summary(without, Path("runs/x"), Console(file=stream, width=100))
    assert "metric" not in stream.getvalue() and "best" not in stream.getvalue()
