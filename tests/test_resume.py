"""Kill -9 during training and during checkpoints: every resume works and ends in the bits of an uninterrupted run.

``benchmarks/kill_loop.py`` does the work, in processes of its own; RECSYS_OFFLOAD_KILLS makes the loop longer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

KILL_LOOP = Path(__file__).parent.parent / "benchmarks" / "kill_loop.py"


def test_runs_that_are_killed_end_in_the_same_bits(tmp_path: Path) -> None:
    kills = os.environ.get("RECSYS_OFFLOAD_KILLS", "3")
    command = [sys.executable, str(KILL_LOOP), "--kills", kills, "--folder", str(tmp_path), "--steps", "100"]
    path = os.pathsep.join([str(KILL_LOOP.parent.parent), *sys.path])
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert result.returncode == 0, result.stdout + result.stderr
    counts = re.search(r"(\d+) kills \(.*\), (\d+) resumes from a checkpoint", result.stdout)
    assert counts and int(counts[1]) == int(kills) and int(counts[2]) > 0
