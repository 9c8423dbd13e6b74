"""Evaluate and predict from a run folder or a checkpoint, on the command line and from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys_offload import evaluate, predict, train
from recsys_offload.inference import load_model
from recsys_offload.metrics import METRICS, weighted_auc
from tests.small_run import ROWS, write_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; its data is ``clicks.parquet`` beside it."""
    folder = tmp_path_factory.mktemp("run")
    config = write_settings(folder, train={"epochs": 2}, checkpoint={"keep": 1})
    assert train.main([str(config)]) == 0
    return folder / "run"


@pytest.fixture
def clicks(run: Path) -> pa.Table:
    return pq.read_table(run.parent / "clicks.parquet")


def scores(run: Path, tmp_path: Path, *options: str) -> pa.Table:
    output = tmp_path / "scores.parquet"
    assert predict.main([str(run), "--out", str(output), *options]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "scores"))] == [output.name]
    return pq.read_table(output)


# ---------------------------------------------------------------------------------------------------- evaluate


def test_the_test_part_has_the_metrics_of_the_summary(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(run)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    expected = json.loads((run / "summary.json").read_text())
    assert {key: found[key] for key in expected["test"]} == expected["test"]
    assert found["part"] == "test" and Path(found["checkpoint"]) == run / expected["best_checkpoint"]
    assert all(metric.replace("_", " ") in captured.err for metric in METRICS)


def test_a_single_checkpoint_and_another_part(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert evaluate.main([str(run / summary["best_checkpoint"]), "--part", "validation"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in summary["validation"]} == summary["validation"]


def test_other_files(run: Path, tmp_path: Path, clicks: pa.Table, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(clicks.slice(0, 300), tmp_path / "a.parquet")
    pq.write_table(clicks.slice(300, 200), tmp_path / "b.parquet")
    assert evaluate.main([str(run), "--data", str(tmp_path), "--batch-size", "77"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["part"], found["examples"]) == ("all", 500)
    table = scores(run, tmp_path, "--data", str(run.parent / "clicks.parquet"))
    expected = weighted_auc(
        torch.from_numpy(table["score"].to_numpy()[:500]),
        torch.from_numpy(table["label"].to_numpy()[:500]),
        torch.ones(500),
    )
    assert found["auc"] == pytest.approx(expected, abs=1e-6)


def test_evaluating_changes_nothing(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert evaluate.main([str(run)]) == 0
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_in_progress_gives_its_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    newest = max((run / "checkpoints").glob("step-*")).name
    assert load_model(tmp_path / "run", torch.device("cpu")).checkpoint.name == newest


# ---------------------------------------------------------------------------------------------------- predict


def test_scores_are_the_models_in_the_order_of_the_rows(run: Path, tmp_path: Path, clicks: pa.Table) -> None:
    table = scores(run, tmp_path, "--data", str(run.parent / "clicks.parquet"))
    assert table.drop_columns("score").equals(clicks)
    found = table["score"].to_numpy()
    assert found.dtype == np.float32 and len(found) == ROWS and ((found > 0) & (found < 1)).all()
    # In any other order, rows that the model was trained on would not be told apart so well.
    auc = weighted_auc(torch.from_numpy(found.copy()), torch.from_numpy(clicks["label"].to_numpy()), torch.ones(ROWS))
    assert auc > 0.7
    for row in (0, 249, 250, ROWS - 1):
        pq.write_table(clicks.slice(row, 1), tmp_path / "one.parquet")
        alone = scores(run, tmp_path, "--data", str(tmp_path / "one.parquet"))["score"][0].as_py()
        assert alone == pytest.approx(found[row], rel=1e-5)


@pytest.mark.parametrize("batch_size", ["1200", "199"])
def test_the_batch_size_does_not_matter(run: Path, tmp_path: Path, batch_size: str) -> None:
    data = ["--data", str(run.parent / "clicks.parquet")]
    default, other = scores(run, tmp_path, *data), scores(run, tmp_path, *data, "--batch-size", batch_size)
    np.testing.assert_allclose(default["score"].to_numpy(), other["score"].to_numpy(), rtol=1e-5)


def test_several_files_without_labels_and_with_other_columns(run: Path, tmp_path: Path, clicks: pa.Table) -> None:
    names = pa.array([f"row {row}" for row in range(ROWS)])
    unlabelled = clicks.drop_columns(["label", "weight", "day"]).append_column("name", names)
    (tmp_path / "in").mkdir()
    pq.write_table(unlabelled.slice(0, 700), tmp_path / "in" / "a.parquet", row_group_size=300)
    pq.write_table(unlabelled.slice(700), tmp_path / "in" / "b.parquet", row_group_size=1000)
    table = scores(run, tmp_path, "--data", str(tmp_path / "in"), "--columns", "name", "user")
    assert table.column_names == ["name", "user", "score"]
    assert table["name"].to_pylist() == names.to_pylist()
    whole = scores(run, tmp_path, "--data", str(run.parent / "clicks.parquet"))
    np.testing.assert_allclose(table["score"].to_numpy(), whole["score"].to_numpy(), rtol=1e-5)


def test_scores_alone(run: Path, tmp_path: Path) -> None:
    table = scores(run, tmp_path, "--data", str(run.parent / "clicks.parquet"), "--columns")
    assert table.column_names == ["score"] and len(table) == ROWS


# ---------------------------------------------------------------------------------------------------- mistakes


def error_of(main: object, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2  # type: ignore[operator]
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err
    return captured.err


def test_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run folder or checkpoint" in error_of(evaluate.main, [str(tmp_path / "gone")], capsys)
    assert "is neither a run folder" in error_of(evaluate.main, [str(tmp_path)], capsys)


def test_a_run_without_a_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
    assert "holds no checkpoint yet" in error_of(evaluate.main, [str(tmp_path / "run")], capsys)


def test_a_damaged_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").rglob("dense.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    assert "dense.safetensors has" in error_of(evaluate.main, [str(tmp_path / "run")], capsys)


def test_bad_data_and_outputs(run: Path, tmp_path: Path, clicks: pa.Table, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*options: str) -> str:
        before = sorted(tmp_path.iterdir())
        message = error_of(predict.main, [str(run), *options], capsys)
        assert sorted(tmp_path.iterdir()) == before, "nothing may be left half written"
        return message

    data, out = str(run.parent / "clicks.parquet"), str(tmp_path / "out.parquet")
    assert "there is no folder" in error("--data", data, "--out", str(tmp_path / "no" / "out.parquet"))
    assert "is one of the files to read" in error("--data", data, "--out", data)
    assert "has no column 'colour'; it has label, user" in error("--data", data, "--out", out, "--columns", "colour")
    assert "batch_size must be at least 1, not 0" in error("--data", data, "--out", out, "--batch-size", "0")
    assert "gone.parquet" in error("--data", str(tmp_path / "gone.parquet"), "--out", out)

    pq.write_table(clicks.append_column("score", clicks["age"]), tmp_path / "scored.parquet")
    assert "already has a column 'score'" in error("--data", str(tmp_path / "scored.parquet"), "--out", out)
    pq.write_table(clicks.drop_columns("user"), tmp_path / "no_user.parquet")
    assert "user" in error("--data", str(tmp_path / "no_user.parquet"), "--out", out)
    user = clicks["user"].to_numpy().copy()
    user[777] = 10**6
    bad = clicks.set_column(clicks.column_names.index("user"), "user", pa.array(user))
    pq.write_table(bad, tmp_path / "bad.parquet")
    assert "1000000" in error("--data", str(tmp_path / "bad.parquet"), "--out", out)
    pq.write_table(clicks.drop_columns("label"), tmp_path / "unlabelled.parquet")
    assert "label" in error_of(evaluate.main, [str(run), "--data", str(tmp_path / "unlabelled.parquet")], capsys)
