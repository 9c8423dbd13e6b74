"""The settings of a run, for a large GPU by default and for a few seconds on a CPU with ``--rehearse``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PARTS = ("exactness", "transfer", "step", "overlap")
DATA = Path(__file__).resolve().parents[2] / "data"


@dataclass(frozen=True)
class Options:
    """What the command line says; ``--help`` explains each."""

    rehearse: bool
    parts: list[str]
    budget_seconds: float
    copy_to: Path | None
    exact_dims: list[int]
    exact_rows: int
    exact_batch_size: int
    exact_steps: int
    exact_cache: str
    row_bytes: list[int]
    row_counts: list[int]
    table_bytes: int
    copy_bytes: int
    moved_bytes: int
    source: Literal["memory", "parquet"]
    data: Path
    rows: int
    dim: int
    batch_size: int
    steps: int
    block_steps: int
    warm_batches: int
    shares: list[float]
    overlap_share: float
    depth: int
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
    kernels: Literal["triton", "torch"]
    transfer: Literal["zero_copy", "staging"]
    skew: float


REHEARSAL = {
    "exact_dims": [3],
    "exact_rows": 30,
    "exact_batch_size": 3,
    "exact_steps": 3,
    "exact_cache": "25%",
    "row_bytes": [32, 256],
    "row_counts": [16],
    "table_bytes": 1 << 16,
    "copy_bytes": 1 << 20,
    "moved_bytes": 1 << 12,
    "rows": 300,
    "dim": 8,
    "batch_size": 32,
    "steps": 4,
    "block_steps": 2,
    "warm_batches": 4,
    "shares": [10.0, 25.0],
    "overlap_share": 25.0,
    "kernels": "torch",
    "transfer": "staging",
    "budget_seconds": 600.0,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Exactness and speed of the cache on a GPU; see benchmarks/gpu/README.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rehearse", action="store_true", help="the same code in small sizes on the CPU; no number means anything")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run")
    add("--budget-seconds", type=float, default=330.0, help="what no longer fits is left out and marked unmeasured")
    add("--copy-to", type=Path, help="a folder that gets a copy of the report after every part")
    add("--exact-dims", type=int, nargs="+", default=[3, 16, 64, 128], help="widths of the tables compared")
    add("--exact-rows", type=int, default=4000, help="rows of each table compared")
    add("--exact-batch-size", type=int, default=256, help="examples per batch of the comparison")
    add("--exact-steps", type=int, default=10, help="batches of the comparison")
    add("--exact-cache", default="45%", help="size of the cache compared")
    add("--row-bytes", type=int, nargs="+", default=[64, 128, 256, 260, 512, 1024], help="of rows moved")
    add("--row-counts", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="rows per move")
    add("--table-bytes", type=int, default=4 << 30, help="host memory that the rows moved lie in")
    add("--copy-bytes", type=int, default=512 << 20, help="of the pinned copies that are the ceiling")
    add("--moved-bytes", type=int, default=512 << 20, help="moved per figure, at most, in at most 50 moves")
    add("--source", choices=["memory", "parquet"], default="memory", help="where a step's batches come from")
    add("--data", type=Path, default=DATA, help="the folder for generated data sets")
    add("--rows", type=int, default=1_000_000, help="rows per table, 26 tables")
    add("--dim", type=int, default=64, help="width of the tables")
    add("--batch-size", type=int, default=8192, help="examples per step")
    add("--steps", type=int, default=100, help="timed steps per contender")
    add("--block-steps", type=int, default=20, help="timed steps of a contender's turn")
    add("--warm-batches", type=int, default=200, help="other batches, by whose ids the caches are filled first")
    add("--shares", type=float, nargs="+", default=[1.0, 5.0, 10.0, 25.0], help="sizes of the cache, %% of the rows")
    add("--overlap-share", type=float, default=10.0, help="the size of the cache for the overlap, %% of the rows")
    add("--depth", type=int, default=4, help="batches looked ahead")
    add("--optimizer", choices=["sgd", "adagrad", "rowwise_adagrad", "adam"], default="rowwise_adagrad", help="tables'")
    add("--kernels", choices=["triton", "torch"], default="triton", help="over the slots, in training steps")
    add("--transfer", choices=["zero_copy", "staging"], default="zero_copy", help="of the part step; zero_copy: triton")
    add("--skew", type=float, default=1.05, help="exponent of the Zipf law of the ids")
    return parser


def parse_options(arguments: Sequence[str]) -> Options:
    """The options that a command line means; a rehearsal has other defaults."""
    parser = _parser()
    if parser.parse_args(arguments).rehearse:
        parser.set_defaults(**REHEARSAL)
    return Options(**vars(parser.parse_args(arguments)))
