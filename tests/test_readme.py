"""Every command and example of the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_the_python_example_updates_three_rows(tmp_path: Path) -> None:
    (example,) = [block for language, block in BLOCKS if language == "python"]
    assert run([sys.executable, "-c", example], tmp_path).strip() == "tensor(3)"


def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    if not (ROOT / "data" / "movielens" / "ratings.parquet").exists():
        pytest.skip("data/movielens is not there: run `python data/movielens.py`")
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = [command for command in COMMANDS if command.startswith(".venv/bin/python ")]
    assert len(python) == 4
    for command in python:
        run([sys.executable, *shlex.split(command)[1:]], tmp_path)
    assert (tmp_path / "scores.parquet").stat().st_size > 100_000
    assert (tmp_path / "runs" / "hit_rate" / "hit_rate.png").exists()


def test_the_make_targets_exist() -> None:
    targets = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    assert targets == ["train", "test"]
    text = (ROOT / "README.md").read_text()
    for target in {*targets, *re.findall(r"`make (\w+)`", text)}:
        run(["make", "-n", target], ROOT)
    for script in re.findall(r"`(benchmarks/\w+\.py)`", text):
        assert (ROOT / script).exists()


def test_the_settings_it_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table of settings shortens their names
    named = re.findall(r"`--(\w+\.\w+)", (ROOT / "README.md").read_text())
    assert named
    explained = run([sys.executable, "-m", "recsys_offload.train", "--help"], ROOT)
    for name in named:
        assert f"--{name} " in explained
