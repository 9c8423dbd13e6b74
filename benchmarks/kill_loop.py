"""Kill training with SIGKILL again and again, resume, and compare with a run that was left in peace.

    python benchmarks/kill_loop.py --kills 100

Every attempt is a fresh process (forked after the imports, so that a loop of many kills takes minutes, not hours). It
is killed at a random moment, or while a checkpoint is written, renamed or deleted. When a run has come to its end,
its checkpoint and its metrics must be those of the uninterrupted run, to the bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from recsys_offload.train import main as train

ROWS = 6000
TIMES = {"seconds", "training_seconds", "samples_per_second", "examples_per_second"}
# What the cache of one process did, and when: not what was trained.
CACHE_FIGURES = ("cache", "queue_")
CONFIG: dict[str, Any] = {
    "data": {
        "dense": {"age": {"transform": "standardize"}, "price": {"transform": "log1p"}},
        "sparse": {
            "user": {"num_embeddings": 3000},
            "item": {"num_embeddings": 2000, "encoding": "hash"},
            "tags": {"num_embeddings": 50, "pooling": "mean"},
        },
        "split": {"by": "hash"},
        "shuffle": {"buffer_rows": 700},
    },
    "model": {"name": "dlrm", "embedding_dim": 16, "dense_layers": [16], "over_layers": [16]},
    "embedding": {"optimizer": {"name": "adam", "learning_rate": 0.01}},
    "schedules": {"dense": {"name": "cosine", "warmup_steps": 10}, "sparse": {"name": "polynomial"}},
    "train": {"batch_size": 64, "epochs": None, "evaluation_interval_steps": 40},
    "checkpoint": {"interval_steps": 7, "keep": 2},
    "logging": {"interval_steps": 5, "tensorboard": False},
}


def write_data(path: Path) -> None:
    """A small Parquet file with several row groups and clicks that can be learned."""
    generator = np.random.default_rng(0)
    user, item = generator.integers(0, 3000, ROWS), generator.integers(0, 10**9, ROWS)
    taste = generator.normal(size=3000)
    table = pa.table(
        {
            "age": generator.normal(40, 10, ROWS),
            "price": generator.exponential(5, ROWS),
            "user": user,
            "item": item,
            "tags": [list(map(int, generator.integers(0, 50, count))) for count in generator.integers(0, 4, ROWS)],
            "label": (taste[user] + generator.normal(size=ROWS) > 0).astype(np.int64),
        }
    )
    pq.write_table(table, path, row_group_size=900)


def start(config: Path, folder: Path, log: Path) -> int:
    """Train in a child process; returns its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = train([str(config), "--run.folder", str(folder)]) or 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


def has_ended(child: int) -> bool:
    """Whether the child has come to the end by itself; raises where it failed."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid and status:
        raise RuntimeError(f"training failed with status {os.waitstatus_to_exitcode(status)}")
    return bool(pid)


def kill_when(child: int, moment: Callable[[], bool], delay: float) -> bool:
    """Kill the child ``delay`` seconds after ``moment`` is first true; False where it ended before."""
    deadline = None
    while not has_ended(child):
        if deadline is None and moment():
            deadline = time.monotonic() + delay
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.0002)
    return False


def appear(folder: Path, prefix: str, count: int) -> Callable[[], bool]:
    """Whether ``count`` things named ``prefix...`` have come into ``folder``, those that earlier crashes left aside."""

    def names() -> set[str]:
        try:
            return {path.name for path in folder.iterdir() if path.name.startswith(prefix)}
        except FileNotFoundError:
            return set()

    leftovers, seen = names(), set[str]()

    def check() -> bool:
        seen.update(names() - leftovers)
        return len(seen) >= count

    return check


def differences(run: Path, reference: Path) -> list[str]:
    """The files in which two finished runs differ in anything but time: their logs, newest and best checkpoint."""
    found = []
    best = json.loads((reference / "summary.json").read_text())["best_checkpoint"]
    newest = max((reference / "checkpoints").glob("step-*")).relative_to(reference)
    for checkpoint in {Path(best), newest}:
        files = [path.relative_to(reference) for path in (reference / checkpoint).rglob("*") if path.is_file()]
        for file in sorted(path for path in files if path.name != "manifest.json"):
            if not same_content(run / file, reference / file, run, reference):
                found.append(str(file))
    for name in ("metrics.jsonl", "summary.json"):
        if not same_content(run / name, reference / name, run, reference):
            found.append(name)
    return found


def same_content(ours: Path, theirs: Path, run: Path, reference: Path) -> bool:
    """Whether two files are equal; in JSON, times and cache figures do not count, nor the names of the run folders."""
    if not ours.exists():
        return False
    if theirs.suffix not in (".json", ".jsonl"):
        return ours.read_bytes() == theirs.read_bytes()
    texts = [path.read_text().replace(str(folder), "RUN") for path, folder in ((ours, run), (theirs, reference))]
    if theirs.suffix == ".jsonl":
        return [without_times(json.loads(line)) for line in texts[0].splitlines()] == [
            without_times(json.loads(line)) for line in texts[1].splitlines()
        ]
    return without_times(json.loads(texts[0])) == without_times(json.loads(texts[1]))


def without_times(content: Any) -> Any:
    if isinstance(content, dict):
        kept = [key for key in content if key not in TIMES and not key.startswith(CACHE_FIGURES)]
        return {key: without_times(content[key]) for key in kept}
    return [without_times(item) for item in content] if isinstance(content, list) else content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--steps", type=int, default=225, help="of each run")
    parser.add_argument("--folder", type=Path, help="where the runs lie; by default a temporary folder")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    work = Path(tempfile.mkdtemp(prefix="kill-loop-", dir=options.folder))
    config, log = work / "config.yaml", work / "log.txt"
    # pyarrow's threads would not survive into the children that are forked later.
    writer = multiprocessing.get_context("fork").Process(target=write_data, args=[work / "data.parquet"])
    writer.start()
    writer.join()
    sections = {"data": {"train": str(work / "data.parquet")}, "train": {"steps": options.steps}}
    tree = CONFIG | {name: CONFIG[name] | section for name, section in sections.items()}
    config.write_text(yaml.safe_dump(tree))

    reference = work / "reference"
    began = time.monotonic()
    child = start(config, reference, log)
    while not has_ended(child):
        time.sleep(0.01)
    duration = time.monotonic() - began
    print(f"uninterrupted: {duration:.1f} s, {work}", flush=True)

    kills: Counter[str] = Counter()
    runs = 0
    while kills.total() < options.kills:
        runs += 1
        run = work / f"run-{runs}"
        ended = False
        while not ended:
            checkpoints = run / "checkpoints"
            moments = {
                "at a random time": (lambda: True, generator.uniform(0, duration)),
                "while saving": (appear(checkpoints, ".saving-", generator.randint(2, 5)), generator.uniform(0, 0.05)),
                "while deleting": (
                    appear(checkpoints, ".deleting-", generator.randint(1, 4)),
                    generator.uniform(0, 0.002),
                ),
                "never": (lambda: False, 0.0),
            }
            kind = generator.choice(list(moments)[:3]) if kills.total() < options.kills else "never"
            moment, delay = moments[kind]
            child = start(config, run, log)
            ended = not kill_when(child, moment, delay)
            kills[kind] += not ended
        found = differences(run, reference)
        if found:
            print(f"{run} differs from {reference} in {', '.join(found)}; see {log}", flush=True)
            return 1
        shutil.rmtree(run)
    resumes = log.read_text().count("Going on from ")
    shutil.rmtree(work)
    kinds = ", ".join(f"{count} {kind}" for kind, count in kills.items() if count)
    print(
        f"{kills.total()} kills ({kinds}), {resumes} resumes from a checkpoint, {runs} runs to the end: "
        "each in the same bits as the uninterrupted one"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
