"""What the benchmarks share: contenders that take turns in one run, ratios within a turn, reports that say where."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "torchrec", "numba", "numpy", "pyarrow")
THREADING_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY")


def alternate(contenders: Mapping[str, Callable[[], None]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Calls every contender once a round, each round starting with another one, so that all share the machine's moods.

    Args:
        contenders: name -> a block of work.
        rounds: that count.
        warmup: rounds before those, untimed.

    Returns:
        name -> seconds of its block in each round.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            contenders[name]()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(seconds: list[float], base: list[float]) -> float:
    """The median over rounds of one contender's time over another's."""
    return statistics.median(one / other for one, other in zip(seconds, base, strict=True))


def machine() -> dict[str, Any]:
    """The machine and the versions that a figure holds for."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "environment": {name: os.environ[name] for name in THREADING_VARIABLES if name in os.environ},
    }


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent)
    except FileNotFoundError:  # no git here
        return None
    return result.stdout.strip() or None


def write_report(name: str, figures: Mapping[str, Any]) -> Path:
    """Writes the figures, with command, date, commit and machine, as ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        **figures,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)
    return path
