"""Training end to end on small Parquet files."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from recsys_offload.checkpoint import latest_checkpoint
from recsys_offload.config import load_config
from recsys_offload.faults import NonFiniteLossError
from recsys_offload.run_folder import RunFolder
from recsys_offload.stop_request import StopRequested
from recsys_offload.summary import Summary
from recsys_offload.trainer import Trainer
from tests.small_run import write_data, write_settings


@pytest.fixture(autouse=True)
def _keep_torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _open(folder: Path, *overrides: str, **sections: Any) -> tuple[RunFolder, Trainer]:
    folder.mkdir(exist_ok=True)
    run = RunFolder(load_config([str(write_settings(folder, **sections)), *overrides]))
    try:
        return run, Trainer(run, Console(file=io.StringIO()))
    except BaseException:
        run.close()
        raise


def _train(folder: Path, *overrides: str, **sections: Any) -> tuple[Summary, dict[str, torch.Tensor], list[dict]]:
    """Train to the end; the summary, the weights of the last checkpoint, and the log without its timings."""
    run, trainer = _open(folder, *overrides, **sections)
    with run:
        summary = trainer.train()
        records = [
            {
                key: value
                for key, value in item.items()
                if not key.startswith(("samples_per_second", "cache_", "queue_"))
            }
            for item in run.records()
        ]
    return summary, {key: value.clone() for key, value in trainer.model.state_dict().items()}, records


def _assert_same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def test_it_learns_and_reports(tmp_path: Path) -> None:
    summary, _, records = _train(tmp_path, "--train.epochs", "6", "--logging.tensorboard", "true")
    assert summary.reason == "All epochs done" and summary.epochs == 6
    assert summary.validation is not None and summary.test is not None
    assert summary.test["auc"] > 0.8 and summary.test["normalized_entropy"] < 1.0
    assert 80 < summary.test["examples"] < 160
    assert summary.examples == 6 * (1200 - summary.test["examples"] - summary.validation["examples"])
    validation = [record for record in records if record["kind"] == "validation"]
    assert len(validation) == 6
    assert summary.validation["auc"] == max(record["auc"] for record in validation)
    assert (tmp_path / "run" / summary.best_checkpoint / "manifest.json").exists()
    assert [record["kind"] for record in records][-1] == "test"
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(5, summary.steps + 1, 5))
    assert train[-1]["loss"] < train[0]["loss"]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_same_seed_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    one = _train(tmp_path / "one")
    two = _train(tmp_path / "two")
    _assert_same_bits(one[1], two[1])
    assert one[2] == two[2]
    other = _train(tmp_path / "other", "--run.seed", "4")
    assert any(not torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


@pytest.mark.parametrize("stop_at", [7, 15, 16, 20])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path, stop_at: int) -> None:
    sections: dict[str, Any] = {
        "schedules": {"dense": {"name": "cosine", "warmup_steps": 3, "decay_steps": 40}},
        "embedding": {"optimizer": {"name": "adam"}},
        "checkpoint": {"interval_steps": 6},
        "train": {"evaluation_interval_steps": 8},
    }
    whole = _train(tmp_path / "whole", **sections)
    run, trainer = _open(tmp_path / "parts", **sections)
    train_step = trainer._train_step

    def stop_after(batch: Any) -> None:
        train_step(batch)
        trainer.stop.requested = trainer.state.step == stop_at

    trainer._train_step = stop_after  # type: ignore[method-assign]
    with run, pytest.raises(StopRequested):
        trainer.train()
    assert trainer.state.step == stop_at
    newest = latest_checkpoint(tmp_path / "parts" / "run" / "checkpoints")
    assert newest is not None and newest.name == f"step-{stop_at:09d}"
    resumed = _train(tmp_path / "parts", **sections)
    _assert_same_bits(whole[1], resumed[1])
    assert whole[2] == resumed[2]
    assert resumed[0].steps == whole[0].steps and resumed[0].test == whole[0].test


def test_a_stop_during_an_evaluation_is_made_up_for(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole")
    run, trainer = _open(tmp_path / "parts")
    during = None

    class Batches:
        def __iter__(self) -> Any:
            nonlocal during
            for batch in real:
                trainer.stop.requested = True
                during = trainer.state.step
                yield batch

    real, trainer.validation_batches = trainer.validation_batches, Batches()  # type: ignore[assignment]
    with run, pytest.raises(StopRequested):
        trainer.train()
    assert during == trainer.state.step and trainer.state.evaluated_step == 0
    resumed = _train(tmp_path / "parts")
    _assert_same_bits(whole[1], resumed[1])
    assert whole[2] == resumed[2]


def test_more_epochs_later_equal_as_many_at_once(tmp_path: Path) -> None:
    at_once = _train(tmp_path / "once", "--train.epochs", "4")
    _train(tmp_path / "twice", "--train.epochs", "2")
    later = _train(tmp_path / "twice", "--train.epochs", "4")
    _assert_same_bits(at_once[1], later[1])


def test_steps_end_the_run_within_an_epoch(tmp_path: Path) -> None:
    summary, _, records = _train(tmp_path, "--train.steps", "20", "--train.epochs", "null")
    assert summary.steps == 20 and summary.reason == "All steps done"
    assert summary.best_step in (20, next(record["step"] for record in records if record["kind"] == "validation"))


def test_patience_stops_early_and_the_best_is_tested(tmp_path: Path) -> None:
    summary, _, records = _train(
        tmp_path, "--train.epochs", "60", "--train.patience", "2", "--embedding.optimizer.learning_rate", "0.5"
    )
    assert summary.reason == "No better auc in 2 evaluations"
    steps = [record["step"] for record in records if record["kind"] == "validation"]
    assert summary.best_step == steps[-3] and summary.steps == steps[-1]
    assert summary.best_checkpoint.endswith(f"step-{steps[-3]:09d}")
    assert records[-1]["kind"] == "test" and records[-1]["step"] == summary.best_step


def test_without_validation_and_test_the_last_model_counts(tmp_path: Path) -> None:
    summary, _, records = _train(tmp_path, data={"split": None})
    assert summary.validation is None and summary.test is None and summary.best_step is None
    assert summary.best_checkpoint == f"checkpoints/step-{summary.steps:09d}"
    assert {record["kind"] for record in records} == {"train"}


def test_sample_weights_count_in_loss_and_metrics(tmp_path: Path) -> None:
    plain = _train(tmp_path / "plain")
    weighted = _train(tmp_path / "weighted", data={"sample_weight": "weight"})
    assert any(not torch.equal(tensor, weighted[1][name]) for name, tensor in plain[1].items())
    (tmp_path / "ones").mkdir()
    write_data(tmp_path / "ones" / "clicks.parquet", weight=np.ones(1200))
    ones = _train(tmp_path / "ones", data={"sample_weight": "weight"})
    _assert_same_bits(plain[1], ones[1])


def test_the_rates_follow_their_own_schedules(tmp_path: Path) -> None:
    _, _, records = _train(
        tmp_path,
        schedules={"dense": {"warmup_steps": 10}, "sparse": {"name": "step", "milestones": [10], "step_factor": 0.5}},
    )
    train = {record["step"]: record for record in records if record["kind"] == "train"}
    [sparse] = [key for key in train[5] if key.startswith("sparse")]
    assert train[5]["dense_learning_rate"] == pytest.approx(0.0025)
    assert train[15]["dense_learning_rate"] == pytest.approx(0.005)
    assert train[5][sparse] == pytest.approx(0.05) and train[15][sparse] == pytest.approx(0.025)


def test_clipping_bounds_the_dense_gradient(tmp_path: Path) -> None:
    run, trainer = _open(tmp_path, "--train.gradient_clipping", "1e-3", "--train.steps", "3")
    with run:
        trainer.train()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trainer.parameters])
    assert 0 < norm <= 1.001e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "adamw"])
def test_every_dense_optimizer_trains(tmp_path: Path, optimizer: str) -> None:
    _, weights, _ = _train(tmp_path, dense_optimizer={"name": optimizer}, train={"steps": 4})
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_loss_that_is_not_finite_names_step_batch_and_column(tmp_path: Path) -> None:
    write_data(tmp_path / "clicks.parquet", price=np.full(1200, 3e38))
    with pytest.raises(NonFiniteLossError) as raised:
        _train(tmp_path, data={"dense": {"price": {}}})
    text = str(raised.value)
    assert re.search(
        r"the loss is (nan|inf|-inf) at step \d+, in the batch of 64 examples that starts at .*clicks.parq", text
    )
    assert "dense column 'price': values up to 3e+38" in text
    assert "'age'" not in text


def test_an_id_out_of_range_names_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="user") as raised:
        _train(tmp_path, "--data.sparse.user.num_embeddings", "19")
    assert "19" in str(raised.value)
    assert "clicks.parquet" in "".join(raised.value.__notes__)


def test_one_class_in_the_validation_part_is_no_crash(tmp_path: Path) -> None:
    split = {"by": "column", "column": "day", "train": list(range(8)), "validation": [8], "test": [9]}
    label = np.where(np.arange(1200) // 120 == 8, 0, np.arange(1200) % 2).astype(np.int8)
    write_data(tmp_path / "clicks.parquet", label=label)
    summary, _, _ = _train(tmp_path, data={"split": split}, train={"steps": 4})
    assert summary.best_step is None and summary.test is not None
    assert math.isfinite(summary.test["auc"])


def test_the_folder_holds_what_a_user_needs(tmp_path: Path) -> None:
    from recsys_offload.train import main

    assert main([str(write_settings(tmp_path, train={"steps": 6}))]) == 0
    run = tmp_path / "run"
    assert {"config.yaml", "encoding", "metrics.jsonl", "checkpoints", "summary.json", "curves.png"} <= {
        item.name for item in run.iterdir()
    }
    assert json.loads((run / "summary.json").read_text())["steps"] == 6
