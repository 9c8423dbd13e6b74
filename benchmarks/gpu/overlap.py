"""How much of the time that rows are on their way is hidden under the compute, with and without look-ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.report import UNMEASURED, is_measured, show_missing
from benchmarks.gpu.step import RESIDENT, make
from benchmarks.gpu.workbench import Times, Turn, Workbench
from recsys_offload.embedding.config import TransferName

TRANSFERS: tuple[TransferName, ...] = ("zero_copy", "staging")


def lane_name(transfer: str, depth: int) -> str:
    """Of a figure."""
    return f"{transfer}, look-ahead {depth}"


def run(workbench: Workbench, budget: Budget, console: Console) -> dict[str, Any]:
    """Both transfers, and all rows on the device, each with and without look-ahead."""
    options = workbench.options
    makers: dict[str, Callable[[], Contender]] = {RESIDENT: partial(workbench.ours, None, options.transfer)}
    makers |= {transfer: partial(workbench.ours, options.overlap_share, transfer) for transfer in TRANSFERS}
    contenders, absent = make(makers, "the time was over", budget)
    depths = dict.fromkeys((0, options.depth))
    turns = {
        lane_name(name, depth): Turn(contender, depth) for name, contender in contenders.items() for depth in depths
    }
    times = workbench.alternate(turns, budget)
    figures: dict[str, Any] = {}
    for name in makers:
        for depth in depths:
            lane = lane_name(name, depth)
            figures[lane] = (
                absent[name] if name in absent else _figures(times[lane], times.get(lane_name(RESIDENT, depth)))
            )
    _show(options.overlap_share, figures, console)
    return {"share_percent": options.overlap_share, "lanes": figures}


def _figures(times: Times, resident: Times | None) -> dict[str, Any]:
    """The share hidden, as the cache's own statistics have it, and as the steps' times have it.

    The statistics know for how long the thread that trains waited, not for how long the device did. What a step takes
    longer than with all rows on the device includes both, and the work of admitting rows besides.
    """
    moving = 1e3 * times.per_step(times.counts.moving_seconds)
    stalled = 1e3 * times.per_step(times.counts.stalled_seconds)
    longer = None if resident is None else times.ms_per_step - resident.ms_per_step
    return {
        "ms_per_step": times.ms_per_step,
        "moving_ms_per_step": moving,
        "stalled_ms_per_step": stalled,
        "longer_than_resident_ms": longer,
        "hidden_by_statistics": 1 - stalled / moving if moving else None,
        "hidden_by_step_times": 1 - longer / moving if moving and longer is not None else None,
        "turn_seconds": times.seconds,
    }


def _show(share: float, figures: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Rows on their way, and how much of that is hidden, with a cache of {share:g}%; ms per step")
    table.add_column("rows")
    for column in (
        "step", "moving", "training stalled", "longer than resident", "hidden, by stalls", "hidden, by step times",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for name, one in figures.items():
        if not is_measured(one):
            table.add_row(name, UNMEASURED)
            continue
        values = [one[key] for key in ("ms_per_step", "moving_ms_per_step", "stalled_ms_per_step")]
        shares = [one[key] for key in ("hidden_by_statistics", "hidden_by_step_times")]
        longer = one["longer_than_resident_ms"]
        table.add_row(
            name,
            *(f"{value:.2f}" for value in values),
            "" if longer is None else f"{longer:+.2f}",
            *("" if value is None else f"{value:.0%}" for value in shares),
        )
    console.print(table)
    show_missing(figures, console)
