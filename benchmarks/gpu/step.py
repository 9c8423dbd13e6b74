"""A training step of DLRM with a cache of several sizes, against all rows on the device and FBGEMM's cache."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import median_ratio
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.fbgemm_caching import ManagedCaching, why_not
from benchmarks.gpu.options import Options
from benchmarks.gpu.report import UNMEASURED, is_measured, show_missing, unmeasured
from benchmarks.gpu.workbench import Times, Turn, Workbench

RESIDENT = "all rows on the device"
# What keeps a contender from being made: memory that is not there, or a way to move rows that is not possible.
NOT_POSSIBLE = (MemoryError, ValueError, torch.OutOfMemoryError)
STEPS_TRIED = 3


def cache_name(share: float) -> str:
    """Of a contender with our cache."""
    return f"cache of {share:g}%"


def fbgemm_name(share: float) -> str:
    """Of a contender with FBGEMM's cache."""
    return f"FBGEMM, managed caching, {share:g}%"


def make(
    makers: dict[str, Callable[[], Contender]], late: str, budget: Budget
) -> tuple[dict[str, Contender], dict[str, dict[str, Any]]]:
    """Makes contenders as long as there is time; the second result says why the others are not there."""
    contenders: dict[str, Contender] = {}
    missing: dict[str, dict[str, Any]] = {}
    for name, maker in makers.items():
        if budget.spent:
            missing[name] = unmeasured(late)
            continue
        try:
            contenders[name] = maker()
        except NOT_POSSIBLE as error:
            missing[name] = unmeasured(f"{type(error).__name__}: {error}")
    return contenders, missing


def _fbgemm(workbench: Workbench, share: float) -> Contender:
    """FBGEMM's contender, after it has shown that it runs.

    Raises:
        ValueError: it does not. That must not end the turns of the others.
    """
    try:
        contender = ManagedCaching(workbench.options, workbench.device, share)
        for _ in contender.steps(workbench.batches.block(0, STEPS_TRIED), workbench.options.depth):
            pass
    except Exception as error:
        raise ValueError(f"FBGEMM's cache does not run here: {type(error).__name__}: {error}") from error
    return contender


def run(workbench: Workbench, budget: Budget, console: Console) -> dict[str, Any]:
    """The median step of every contender; what is not there is ``unmeasured``."""
    options, device = workbench.options, workbench.device
    makers: dict[str, Callable[[], Contender]] = {RESIDENT: partial(workbench.ours, None, options.transfer)}
    for share in options.shares:
        makers[cache_name(share)] = partial(workbench.ours, share, options.transfer)
    absent = why_not(options, device)
    if absent is None:
        for share in options.shares:
            makers[fbgemm_name(share)] = partial(_fbgemm, workbench, share)
    contenders, missing = make(makers, "the time was over", budget)
    if absent is not None:
        missing |= {fbgemm_name(share): unmeasured(absent) for share in options.shares}
    turns = {name: Turn(contender, options.depth) for name, contender in contenders.items()}
    times = workbench.alternate(turns, budget)
    base = times.get(RESIDENT)
    figures = {name: _figures(options, contenders[name], one, base) for name, one in times.items()} | missing
    contenders.clear()
    turns.clear()
    gc.collect()  # FBGEMM's memory, before the next part wants some
    _show(options, figures, console)
    return {"contenders": figures}


def _figures(options: Options, contender: Contender, times: Times, base: Times | None) -> dict[str, Any]:
    counts = times.counts
    return {
        **contender.describe(),
        "ms_per_step": times.ms_per_step,
        "examples_per_second": 1e3 * options.batch_size / times.ms_per_step,
        "throughput_over_resident": None if base is None else median_ratio(base.seconds, times.seconds),
        "hit_rate": counts.hit_rate if counts.rows else None,
        "fetched_rows_per_step": times.per_step(counts.fetched),
        "written_back_rows_per_step": times.per_step(counts.written_back),
        "moved_bytes_per_step": times.per_step(counts.fetched_bytes + counts.written_back_bytes),
        "grown": counts.grown,
        "turn_seconds": times.seconds,
    }


def _show(options: Options, figures: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(
        title=f"DLRM, 26 tables x {options.rows:,} rows x dim {options.dim}, batch {options.batch_size}, "
        f"{options.optimizer}, batches from {options.source}, look-ahead {options.depth}"
    )
    table.add_column("tables")
    for column in ("ms/step", "examples/s", "throughput over resident", "hit rate", "rows fetched/step"):
        table.add_column(column, justify="right")
    for name, one in figures.items():
        if not is_measured(one):
            table.add_row(name, UNMEASURED)
            continue
        ratio, hit_rate = one["throughput_over_resident"], one["hit_rate"]
        table.add_row(
            name,
            f"{one['ms_per_step']:.2f}",
            f"{one['examples_per_second']:,.0f}",
            "" if ratio is None else f"{ratio:.2f}x",
            "" if hit_rate is None else f"{hit_rate:.1%}",
            "" if hit_rate is None else f"{one['fetched_rows_per_step']:,.0f}",
        )
    console.print(table)
    show_missing(figures, console)
    turns = statistics.median(len(one.get("turn_seconds", ())) for one in figures.values() if is_measured(one))
    console.print(
        f"Medians over {turns:g} turns of {options.block_steps} timed steps; ratios are medians within a turn."
    )
