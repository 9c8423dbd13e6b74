"""The run folder: made, opened again, refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recsys_offload.config import Config, load_config
from recsys_offload.run_folder import RunFolder, RunFolderError
from tests.small_run import write_settings


def _config(folder: Path, *overrides: str) -> Config:
    return load_config([str(write_settings(folder)), *overrides])


def test_a_new_folder_is_named_after_run_and_time(tmp_path: Path) -> None:
    config = _config(tmp_path, "--run.folder", "null", "--run.root", str(tmp_path / "runs"), "--run.name", "first")
    with RunFolder(config) as one, RunFolder(config) as two:
        assert re.fullmatch(r"first-\d{8}-\d{6}", one.path.name)
        assert one.path.parent == tmp_path / "runs" and two.path != one.path
        assert load_config([str(one.path / "config.yaml")]) == one.config
        assert one.config.run.folder == one.path


def test_records_are_written_and_cut_back_on_resuming(tmp_path: Path) -> None:
    with RunFolder(_config(tmp_path, "--logging.tensorboard", "true")) as run:
        run.start_logs(0)
        for step in (5, 10, 15):
            run.log("train", step, {"loss": 0.5, "undefined": float("nan")})
        run.log("test", 10, {"auc": 0.7})
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    path = tmp_path / "run" / "metrics.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {"kind": "train", "step": 5, "loss": 0.5, "undefined": None}
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # a crash in the middle of a line
    with RunFolder(_config(tmp_path)) as run:
        run.start_logs(10)
        assert [(record["kind"], record["step"]) for record in run.records()] == [("train", 5), ("train", 10)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with RunFolder(config), pytest.raises(RunFolderError, match="in use by another process"):
        RunFolder(config)
    RunFolder(config).close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.batch_size", "32"], r"train\.batch_size: 64 there, 32 now"),
        (["--run.seed", "4"], r"run\.seed: 3 there, 4 now"),
        (["--data.sparse.user.num_embeddings", "21"], r"data\.sparse\.user\.num_embeddings: 20 there, 21 now"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    RunFolder(_config(tmp_path)).close()
    with pytest.raises(RunFolderError, match=message):
        RunFolder(_config(tmp_path, *overrides))
    assert load_config([str(tmp_path / "run" / "config.yaml")]).train.batch_size == 64


def test_harmless_changes_are_taken_over(tmp_path: Path) -> None:
    RunFolder(_config(tmp_path)).close()
    with RunFolder(_config(tmp_path, "--train.epochs", "9", "--logging.interval_steps", "1")) as run:
        assert load_config([str(run.path / "config.yaml")]).train.epochs == 9


def test_a_new_length_is_refused_where_a_schedule_ends_with_the_run(tmp_path: Path) -> None:
    cosine = ("--schedules.dense", "{name: cosine}")
    RunFolder(_config(tmp_path, *cosine)).close()
    with pytest.raises(RunFolderError, match=r"train\.epochs: 3 there, 9 now\n.*schedules\.dense decays to the end"):
        RunFolder(_config(tmp_path, *cosine, "--train.epochs", "9"))


def test_never_resuming_refuses_a_used_folder(tmp_path: Path) -> None:
    RunFolder(_config(tmp_path)).close()
    with pytest.raises(RunFolderError, match=r"has been used, and run\.resume is never"):
        RunFolder(_config(tmp_path, "--run.resume", "never"))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match=r"no run's, but holds other files \(thesis\.tex\)"):
        RunFolder(_config(tmp_path))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write the run folder '.*file/run'.*Not a directory"):
        RunFolder(_config(tmp_path, "--run.folder", str(tmp_path / "file" / "run")))
    with pytest.raises(RunFolderError, match=r"cannot write the run folder '/proc/run'"):
        RunFolder(_config(tmp_path, "--run.folder", "/proc/run"))
