"""How much of the bus moving rows gets out of it, by zero copy and by staging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.bus import measure_bus
from benchmarks.gpu.options import Options
from benchmarks.gpu.report import UNMEASURED
from benchmarks.gpu.row_moves import ZERO_COPY, RowMover, RowMoves
from recsys_offload.embedding.runtime import runtime_for

NOT_PINNED = "host memory could not be pinned (see the warning)"
LATE = "the time was over"


def run(options: Options, device: torch.device, budget: Budget, console: Console) -> dict[str, Any]:
    """The bus by itself, then rows of every width and in every number; the widths that no longer fit are left out."""
    runtime = runtime_for(device)
    bus = measure_bus(runtime, options.copy_bytes)
    _show_bus(bus, console)
    mover = RowMover(runtime, options.table_bytes, options.moved_bytes, bus)
    missing = {} if mover.zero_copy_is_possible else {ZERO_COPY: NOT_PINNED}
    results: list[RowMoves] = []
    for row_bytes in options.row_bytes:
        for rows in options.row_counts:
            if budget.spent:
                missing[f"{rows:,} rows of {row_bytes} bytes"] = LATE
            else:
                results += mover.measure(row_bytes, rows)
    _show_rows(results, options, console)
    for what, why in missing.items():
        console.print(f"{what}: {UNMEASURED}, {why}.")
    return {
        "pinned_copies_bytes_per_second": bus,
        "rows": [asdict(result) for result in results],
        UNMEASURED: missing,
    }


def _show_bus(bus: dict[str, float], console: Console) -> None:
    table = Table(title="Copies of large pinned buffers")
    table.add_column("direction")
    table.add_column("GB/s", justify="right")
    for direction, speed in bus.items():
        table.add_row(direction, f"{speed / 1e9:.1f}")
    console.print(table)


def _show_rows(results: Sequence[RowMoves], options: Options, console: Console) -> None:
    table = Table(title="Random rows, GB/s (share of large pinned copies in the same direction)")
    table.add_column("way")
    table.add_column("direction")
    table.add_column("rows per move", justify="right")
    for row_bytes in options.row_bytes:
        table.add_column(f"{row_bytes} bytes", justify="right")
    cells = {(one.way, one.direction, one.rows, one.row_bytes): one for one in results}
    for way, direction, rows in dict.fromkeys((one.way, one.direction, one.rows) for one in results):
        row = [cells.get((way, direction, rows, row_bytes)) for row_bytes in options.row_bytes]
        table.add_row(
            way,
            direction,
            f"{rows:,}",
            *(
                UNMEASURED if cell is None else f"{cell.bytes_per_second / 1e9:.2f} ({cell.share_of_pinned_copies:.0%})"
                for cell in row
            ),
        )
    console.print(table)
