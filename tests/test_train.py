"""The command line: exit codes, messages, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from recsys_offload.checkpoint import latest_checkpoint
from recsys_offload.safetensors_stream import read_safetensors
from recsys_offload.train import main
from tests.small_run import write_data, write_settings


def test_help_explains_the_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: python -m recsys_offload.train CONFIG.yaml" in text
    for key in ("--train.batch_size", "--data.sparse.<name>.num_embeddings", "--schedules.sparse.warmup_steps"):
        assert key in text
    assert "Examples per step." in text and "int (>= 1)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "error: there is no configuration file 'nowhere.yaml'"),
        (["{}", "--train.batchsize", "3"], "did you mean 'train.batch_size'"),
        (["{}", "--data.train", "gone.parquet"], "gone.parquet"),
        (["{}", "--data.label", "clicked"], "clicked"),
        (["{}", "--run.folder", "/proc/x"], "cannot write the run folder '/proc/x'"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    path = write_settings(tmp_path)
    assert main([argument.replace("{}", str(path)) for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors and "Traceback" not in errors


def test_a_diverging_loss_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path / "clicks.parquet", price=[3e38] * 1200)
    path = write_settings(tmp_path, data={"dense": {"price": {}}})
    assert main([str(path)]) == 1
    assert "dense column 'price'" in capsys.readouterr().err


def _newest_tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    files = [newest / "dense.safetensors", *sorted((newest / "tables").iterdir())]
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in read_safetensors(file).items()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    write_data(tmp_path / "clicks.parquet")
    interrupted = write_settings(tmp_path, train={"epochs": 100000}, run={"folder": str(tmp_path / "interrupted")})
    process = subprocess.Popen(
        [sys.executable, "-m", "recsys_offload.train", str(interrupted)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("validation at step"):
            process.send_signal(number)
            break
    lines += process.stdout.readlines()
    assert process.wait(timeout=60) == 130, "".join(lines)
    text = "".join(lines)
    assert "Stopping at the next step boundary" in text and "To go on:" in text
    newest = latest_checkpoint(tmp_path / "interrupted" / "checkpoints")
    assert newest is not None
    steps = int(newest.name.removeprefix("step-"))

    config = tmp_path / "interrupted" / "config.yaml"
    assert main([str(config), "--train.epochs", "null", "--train.steps", str(steps + 20)]) == 0
    saved = yaml.safe_load(interrupted.read_text())
    saved["run"]["folder"] = str(tmp_path / "whole")
    saved["train"].update(epochs=None, steps=steps + 20)
    whole = tmp_path / "whole.yaml"
    whole.write_text(yaml.safe_dump(saved, sort_keys=False))
    assert main([str(whole)]) == 0
    one, two = _newest_tensors(tmp_path / "interrupted"), _newest_tensors(tmp_path / "whole")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def test_the_progress_is_plain_lines_when_the_output_is_no_terminal(tmp_path: Path) -> None:
    path = write_settings(tmp_path, train={"steps": 5})
    done = subprocess.run(
        [sys.executable, "-m", "recsys_offload.train", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch 1  step ")]
    assert len(lines) == 5 and all("samples/s" in line for line in lines)
    assert "\x1b" not in done.stdout
