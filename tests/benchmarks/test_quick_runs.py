"""The benchmarks of the cache, in small: that they run, that they see what they look for, and write nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


def run(*command: str) -> str:
    before = {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}
    finished = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=BENCHMARKS.parent, timeout=240
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")} == before
    return finished.stdout


def test_the_cache_holds_its_memory_over_many_batches() -> None:
    output = run("benchmarks/soak.py", "--quick", "--batches", "1500")
    lanes = [line for line in output.splitlines() if "nothing" in line]
    assert [name for name in ("host lane", "staging") if any(name in line for line in lanes)] == [
        "host lane",
        "staging",
    ]


def test_a_soak_names_what_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak  # type: ignore[import-not-found]

    early = {"resident_megabytes": 500.0, "threads": 3, "open_files": 6, "objects": {"Event": 4}, "tensors": 5}
    assert soak.growth(early, early) == []
    assert soak.growth(early, {**early, "resident_megabytes": 510.0, "objects": {"Event": 3}}) == []
    late = {"resident_megabytes": 540.0, "threads": 4, "open_files": 7, "objects": {"Event": 9, "Ring": 1}}
    assert soak.growth(early, {**late, "tensors": 7}) == [
        "40 MB of resident memory",
        "1 threads",
        "1 open_files",
        "2 tensors",
        "5 Event",
        "1 Ring",
    ]


def test_planning_is_measured() -> None:
    output = run("benchmarks/planner.py", "--quick")
    assert "ours: slots" in output and "1 x 200,000" in output
