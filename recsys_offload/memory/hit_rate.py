"""Hit rate against cache size, from Parquet files alone: ``python -m recsys_offload.memory.hit_rate DATASET``."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from recsys_offload.config import load_config
from recsys_offload.durable_files import durable_path, write_json
from recsys_offload.embedding.config import slots_for
from recsys_offload.memory.replacement import POLICIES
from recsys_offload.memory.trace import Trace, trace_of_columns, trace_of_training

__all__ = ["HitRates", "draw_hit_rates", "main", "measure_hit_rates"]

DESCRIPTION = """\
Say how many of the embedding rows that batches need would be found in a cache of different sizes.

DATASET is the trainer's configuration, a YAML file: its training part is read as training reads it, and any of its
settings can be given as for the trainer (--data.train FILES, --train.batch_size 4096). Or it is Parquet files, folders
or globs, with --columns: every column is a table with one row for each distinct value, and every --batch-size rows of
the files, in their order, are a batch.

A hit is a distinct row of a batch that has a slot when the batch is admitted. The cache is empty at first. All tables
share it, and all rows of a batch have slots at once.

  ours                 what training does: scores of past uses, and the next batches
  LRU                  the least recently used row goes
  LFU                  the least frequently used row goes; uses of rows without a slot count, too
  static               the most frequent rows of all the data stay; the others pass by and take no slots
  Belady               the most that is possible: all batches are known, and the furthest next use goes
  Belady, look-ahead   the next batches are known: LRU among the rows that they do not need"""

DEFAULT_SIZES = "1%,5%,10%,25%,50%"
DEFAULT_BATCH_SIZE = 2048
_SHARE = re.compile(r"\d+(\.\d*)?%")
_STYLES = ("-", "--", "-.", ":", "-", "--")


@dataclass(frozen=True)
class HitRates:
    """The hit rates at one size.

    Attributes:
        size: a share of the rows, such as ``10%``.
        slots: as many rows.
        rates: policy -> share of the uses that were hits.
    """

    size: str
    slots: int
    rates: dict[str, float]


def measure_hit_rates(trace: Trace, sizes: Mapping[str, int], depth: int) -> list[HitRates]:
    """The hit rates of all policies.

    Args:
        trace: of the batches.
        sizes: size -> slots, each at least ``trace.largest_batch``.
        depth: batches that are known ahead.
    """
    return [
        HitRates(size, slots, {name: hits(trace, slots, depth) / len(trace.rows) for name, hits in POLICIES.items()})
        for size, slots in sizes.items()
    ]


def draw_hit_rates(measured: Sequence[HitRates], title: str, path: Path) -> None:
    """Draws a line per policy over the slots, as a PNG.

    Args:
        measured: at least one size.
        title: of the picture.
        path: of the PNG file; it is replaced as a whole.
    """
    measured = sorted(measured, key=lambda one: one.slots)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for style, name in zip(_STYLES, measured[0].rates, strict=True):
            axes.plot(
                [one.slots for one in measured],
                [100 * one.rates[name] for one in measured],
                style,
                marker="o",
                markersize=3,
                linewidth=2.5 if name == "ours" else 1.2,
                label=name,
            )
        axes.set_xscale("log")
        axes.set_xticks([one.slots for one in measured], [f"{one.size}\n{one.slots:,}" for one in measured])
        axes.minorticks_off()
        axes.set_ylim(0, 100)
        axes.set_xlabel("cache size: share of the rows, slots")
        axes.set_ylabel("hit rate, %")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        with durable_path(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)


def _print_table(measured: Sequence[HitRates], console: Console) -> None:
    table = Table("size", title="Hit rate, %", title_justify="left")
    for name in ("slots", *measured[0].rates):
        table.add_column(name, justify="right")
    for one in measured:
        table.add_row(one.size, f"{one.slots:,}", *(f"{100 * rate:.2f}" for rate in one.rates.values()))
    console.print(table)


def _parse_sizes(text: str) -> list[str]:
    """Raises ValueError where ``text`` is not a list of shares."""
    sizes = [size.strip() for size in text.split(",")]
    for size in sizes:
        if not _SHARE.fullmatch(size) or not 0 < float(size.removesuffix("%")) <= 100:
            raise ValueError(
                f"--sizes {text}: {size!r} is not a share of the rows, such as 10%; at most 100%, above 0%"
            )
    return list(dict.fromkeys(sizes))


def _usable_sizes(trace: Trace, sizes: Sequence[str], console: Console) -> dict[str, int]:
    """The slots of each size that has room for every batch; says which have not.

    Raises:
        ValueError: none has.
    """
    slots = {size: slots_for(size, trace.row_count, 1) for size in sizes}
    largest = trace.largest_batch
    usable = {size: count for size, count in slots.items() if count >= largest}
    room = f"the largest batch uses {largest:,} of {trace.row_count:,} rows at once ({largest / trace.row_count:.1%})"
    if not usable:
        raise ValueError(f"no size of {', '.join(sizes)} is enough, for {room}: use greater --sizes or smaller batches")
    for size in sizes:
        if size not in usable:
            console.print(f"{size} ({slots[size]:,} slots) is skipped: {room}.", highlight=False, soft_wrap=True)
    return usable


def _split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of this program, and the trainer's settings: those whose names have a dot, with their values."""
    own: list[str] = []
    settings: list[str] = []
    awaits_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_setting = name.startswith("--") and "." in name
        is_value = awaits_value and not argument.startswith("--")
        (settings if is_setting or is_value else own).append(argument)
        awaits_value = is_setting and not equals
    return own, settings


def _at_least(least: int) -> Any:
    """A type for argparse: a whole number."""

    def number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_offload.memory.hit_rate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("dataset", nargs="+", metavar="DATASET", help="a configuration (.yaml), or Parquet files, folders or globs")
    add("--columns", help="Parquet: the columns with ids, as user,item (integers, strings, or lists of these)")
    add("--batch-size", type=_at_least(1), help=f"Parquet: rows per batch (default {DEFAULT_BATCH_SIZE})")
    add("--shuffle", action="store_true", help="Parquet: shuffle the rows; a configuration's always are")
    add("--seed", type=_at_least(0), help="Parquet: of --shuffle (default 0)")
    add(
        "--sizes",
        default=DEFAULT_SIZES,
        help=f"cache sizes, in shares of all rows (default {DEFAULT_SIZES})".replace("%", "%%"),
    )
    add("--depth", type=_at_least(0), default=4, help="batches that are known ahead (default 4)")
    add("--epochs", type=_at_least(1), default=1, help="how often the data is read (default 1)")
    add("--rows", type=_at_least(1), help="read so many examples only; of a configuration whole batches")
    add("--out", type=Path, default=Path("hit_rate"), help="folder for hit_rate.json and .png (default hit_rate)")
    return parser


def _read_trace(options: argparse.Namespace, settings: Sequence[str]) -> Trace:
    configurations = [path for path in options.dataset if Path(path).suffix in (".yaml", ".yml")]
    for_parquet = {
        "--columns": options.columns is not None,
        "--batch-size": options.batch_size is not None,
        "--shuffle": options.shuffle,
        "--seed": options.seed is not None,
    }
    if configurations:
        if len(options.dataset) > 1:
            raise ValueError(f"give one configuration and nothing else, or Parquet files, not {options.dataset}")
        given = [name for name, is_given in for_parquet.items() if is_given]
        if given:
            raise ValueError(
                f"{given[0]} is for Parquet files; {configurations[0]} says it itself: use its settings, such as "
                "--train.batch_size, --run.seed or --data.sparse"
            )
        return trace_of_training(load_config([*configurations, *settings]), options.epochs, options.rows)
    if settings:
        raise ValueError(f"{settings[0]} is a setting of a configuration, but {options.dataset[0]} is not a .yaml file")
    if options.seed is not None and not options.shuffle:
        raise ValueError(f"--seed {options.seed} has no meaning without --shuffle")
    columns = [name.strip() for name in (options.columns or "").split(",") if name.strip()]
    if not columns:
        raise ValueError(f"name the columns of {options.dataset[0]} that hold ids: --columns user,item")
    return trace_of_columns(
        options.dataset,
        list(dict.fromkeys(columns)),
        options.batch_size or DEFAULT_BATCH_SIZE,
        options.epochs,
        options.rows,
        (options.seed or 0) if options.shuffle else None,
    )


def _write(measured: Sequence[HitRates], trace: Trace, dataset: str, depth: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "dataset": dataset,
        "tables": trace.names,
        "rows": trace.row_count,
        "batches": len(trace),
        "uses": len(trace.rows),
        "largest_batch": trace.largest_batch,
        "depth": depth,
        "sizes": [{"size": one.size, "slots": one.slots, "hit_rates": one.rates} for one in measured],
    }
    write_json(folder / "hit_rate.json", content)
    draw_hit_rates(measured, f"{dataset}: {trace.row_count:,} rows, look-ahead {depth}", folder / "hit_rate.png")


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code: 0, or 2 for a mistake of the user's."""
    own, settings = _split_settings(arguments)
    options = _parser().parse_args(own)
    console = Console()
    # TorchRec uses a function that torch has renamed, which is nothing the user could act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        sizes = _parse_sizes(options.sizes)
        trace = _read_trace(options, settings)
        usable = _usable_sizes(trace, sizes, console)
        console.print(
            f"{len(trace):,} batches use {len(trace.rows):,} rows, of {trace.row_count:,} in all; "
            f"{options.depth} batches are known ahead.",
            highlight=False,
            soft_wrap=True,
        )
        measured = measure_hit_rates(trace, usable, options.depth)
        _print_table(measured, console)
        _write(measured, trace, " ".join(options.dataset), options.depth, options.out)
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(f"Written: {options.out}/hit_rate.json, hit_rate.png", highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
