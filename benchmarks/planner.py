"""What it costs to plan a batch: its distinct rows, and slots for them; against torch.unique and a dictionary.

Ids are Zipf distributed (exponent 1.05) over 10 million rows, 65,536 to a batch, and 4 batches are known ahead. A
tenth of the rows have slots, the most frequent ones at first, as after long training. Every batch is planned once, so
that about as many rows miss as they would in training. Expected: 50 million ids/s on one core for the directory; as
much for the plan, which has to touch its table for every id, too.

    python benchmarks/planner.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import alternate, median_ratio, write_report
from rich.console import Console
from rich.table import Table
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.embedding import SparseOptimizerSettings
from recsys_offload.embedding.directory import Admission, Directory
from recsys_offload.embedding.plan import GroupFeatures, Ids, Plan, make_plan
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads

BOTH, PLAN, SLOTS, PYTHON = "ours: both", "ours: distinct rows", "ours: slots", "torch.unique and a dictionary"
BATCHES_PER_BLOCK = 4


class Planner:
    """Plans batches and gives their rows slots, as a collection with one group of tables does.

    Attributes:
        misses: rows without a slot so far.
        rows: distinct rows so far.
    """

    def __init__(self, options: argparse.Namespace, uses: np.ndarray) -> None:
        names = [f"table_{index}" for index in range(options.tables)]
        configs = [EmbeddingBagConfig(options.rows, 1, name, feature_names=[name]) for name in names]
        self._threads = KernelThreads(options.threads)
        optimizer = SparseOptimizerSettings(name="sgd")
        (self._group,) = HostTables(configs, optimizer, 0, self._threads, False, None, None).groups
        self._features = GroupFeatures.describe(self._group, configs, dict.fromkeys(names, 0), names)
        self._keys = names
        self._offsets = np.arange(options.tables * options.batch_size + 1)
        self._batch_size, self._depth = options.batch_size, options.depth
        slots = int(options.share * len(uses))
        self._directory = Directory(len(uses), slots, self._threads)
        self._directory.warm(uses)
        self._number = 0
        self.misses = self.rows = 0

    def plan(self, ids: np.ndarray) -> Plan:
        batch = Ids(self._keys, ids, self._offsets, np.empty(0, np.float32), self._batch_size)
        return make_plan(self._group, self._features, batch, True, "error", 0, self._threads)

    def admit(self, plans: list[Plan]) -> None:
        """Gives the first plan's rows slots; the others come after it, and the batch before it is in training."""
        number, self._number = self._number, self._number + 1
        coming = [(number + ahead, plan.rows) for ahead, plan in enumerate(plans[1:], 1)]
        admission = self._directory.admit(plans[0].rows, number, max(0, number - 1), coming)
        assert isinstance(admission, Admission)
        self.misses += len(admission.fetch)
        self.rows += len(plans[0].rows)

    def run(self, batches: Iterator[np.ndarray], known: list[Plan], count: int) -> None:
        """Plans and admits ``count`` batches; ``known`` are the plans of batches that are to be admitted."""
        for _ in range(count):
            while len(known) <= self._depth:
                known.append(self.plan(next(batches)))
            self.admit(known[: self._depth + 1])
            del known[0]


def make_batches(options: argparse.Namespace, count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Batches of ids, each int64 ``[tables * batch_size]``, and how many batches in one use each row, by table."""
    random = np.random.default_rng(0)
    weights = np.arange(1, options.rows + 1, dtype=np.float64) ** -options.skew
    cumulative = np.cumsum(weights)
    uses_of_rank = -np.expm1(-options.batch_size * weights / cumulative[-1])
    places = [random.permutation(options.rows) for _ in range(options.tables)]
    uses = np.empty((options.tables, options.rows), np.float32)
    for table, place in enumerate(places):
        uses[table, place] = uses_of_rank
    batches = []
    for _ in range(count):
        draws = random.random((options.tables, options.batch_size)) * cumulative[-1]
        parts = [place[np.searchsorted(cumulative, draw)] for place, draw in zip(places, draws, strict=True)]
        batches.append(np.concatenate(parts))
    return batches, uses.ravel()


def python_planner(options: argparse.Namespace, uses: np.ndarray) -> Callable[[np.ndarray], list[int]]:
    """What one would write first: it finds slots, but gives none to rows that have none."""
    slots = int(options.share * len(uses))
    frequent = np.argpartition(-uses, slots - 1)[:slots]
    slot_of_row = dict(zip(frequent.tolist(), range(slots), strict=True))
    bases = np.repeat(np.arange(options.tables) * options.rows, options.batch_size)

    def find(ids: np.ndarray) -> list[int]:
        rows, _ = torch.unique(torch.from_numpy(ids + bases), return_inverse=True)
        return [slot_of_row.get(row, -1) for row in rows.tolist()]

    return find


def measure(options: argparse.Namespace) -> dict[str, Any]:
    blocks = options.rounds + 2
    needed = blocks * BATCHES_PER_BLOCK + options.depth
    batches, uses = make_batches(options, needed)
    both, plans_only, slots_only = (Planner(options, uses) for _ in range(3))
    planned = [slots_only.plan(ids) for ids in batches]
    find = python_planner(options, uses)
    streams = {name: iter(batches) for name in (BOTH, PLAN, PYTHON)}
    known: list[Plan] = []
    place = 0

    def run_both() -> None:
        both.run(streams[BOTH], known, BATCHES_PER_BLOCK)

    def run_plan() -> None:
        for _ in range(BATCHES_PER_BLOCK):
            plans_only.plan(next(streams[PLAN]))

    def run_slots() -> None:
        nonlocal place
        for _ in range(BATCHES_PER_BLOCK):
            slots_only.admit(planned[place : place + options.depth + 1])
            place += 1

    def run_python() -> None:
        for _ in range(BATCHES_PER_BLOCK):
            find(next(streams[PYTHON]))

    contenders = {BOTH: run_both, PLAN: run_plan, SLOTS: run_slots, PYTHON: run_python}
    seconds = alternate(contenders, options.rounds, warmup=2)
    ids = BATCHES_PER_BLOCK * options.tables * options.batch_size
    return {
        "ids_per_second": {name: ids / statistics.median(times) for name, times in seconds.items()},
        "python_over_ours": median_ratio(seconds[PYTHON], seconds[BOTH]),
        "rows_per_batch": both.rows / (blocks * BATCHES_PER_BLOCK),
        "misses_per_batch": both.misses / (blocks * BATCHES_PER_BLOCK),
        "seconds_per_block": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=25, help="blocks of each contender (25)")
    add("--skew", type=float, default=1.05, help="Zipf exponent of the ids (1.05)")
    add("--share", type=float, default=0.1, help="of the rows that have slots (0.1)")
    add("--depth", type=int, default=4, help="batches that are known ahead (4)")
    add("--quick", action="store_true", help="fewer rows and rounds, to see that it works; nothing is written")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    cases = [(1, 10_000_000, 65536, 1), (26, 400_000, 2048, 1), (26, 400_000, 2048, threads)]
    if options.quick:
        options.rounds, cases = 3, [(1, 200_000, 8192, 1), (4, 50_000, 2048, threads)]
    torch.set_num_threads(1)  # of torch.unique, which sorts with one
    table = Table("tables", "batch", "threads", "rows", "misses", title="planning, million ids/s")
    for name in (PLAN, SLOTS, BOTH, PYTHON, "ratio"):
        table.add_column(name, justify="right")
    figures: dict[str, Any] = {"settings": {**vars(options)}, "cases": []}
    for options.tables, options.rows, options.batch_size, options.threads in cases:
        measured = measure(options)
        rates = measured["ids_per_second"]
        table.add_row(
            f"{options.tables} x {options.rows:,}",
            f"{options.batch_size:,}",
            str(options.threads),
            f"{measured['rows_per_batch']:,.0f}",
            f"{measured['misses_per_batch']:,.0f}",
            *(f"{rates[name] / 1e6:.1f}" for name in (PLAN, SLOTS, BOTH, PYTHON)),
            f"{measured['python_over_ours']:.1f}x",
        )
        case = {name: getattr(options, name) for name in ("tables", "rows", "batch_size", "threads")}
        figures["cases"].append({**case, **measured})
    Console(width=130).print(table)
    if not options.quick:
        print(f"Wrote {write_report('planner', figures)}")


if __name__ == "__main__":
    main()
