"""How fast batches come out of Parquet, against pyarrow decoding the same file.

One generated Criteo-like file (13 dense and 26 id columns, zstd); the contenders take
turns in one run: pyarrow's `read_row_group` alone, the ceiling; `iter_batches(8192)`; and ours, plain and with
log1p, a split and shuffling on. Expected: ours plain at 80% or more of `read_row_group`.

    python benchmarks/data_loading.py [--rows 2000000]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from common import alternate, median_ratio, write_report
from rich.console import Console
from rich.table import Table

from recsys_offload.data import DataSettings, Encoding, ParquetBatches
from recsys_offload.data.click_log import ClickLog
from recsys_offload.data.criteo import DENSE_NAMES, LABEL, SCHEMAS, SPARSE_NAMES
from recsys_offload.data.synthetic import write

COLUMNS = [LABEL, *DENSE_NAMES, *SPARSE_NAMES]
CEILING = "read_row_group alone"


def make_file(rows: int, null_rate: float) -> Path:
    """The generated file, made at the first call."""
    folder = Path("data") / f"loading-{rows}-{null_rate:g}"
    if not folder.exists():
        print(f"Generating {rows:,} rows in {folder} ...", flush=True)
        log = ClickLog(SCHEMAS["criteo-kaggle"].scaled(0.1), skew=1.05, null_rate=null_rate, scatter_ids=True, seed=0)
        write(log, folder, rows, files=1, row_group_rows=262_144, on_rows=lambda _: None)
    return next(folder.glob("*.parquet"))


def settings(path: Path, transform: str, split: bool) -> DataSettings:
    sparse = {name: {"num_embeddings": 2**31} for name in SPARSE_NAMES}
    dense = {name: {"transform": transform} for name in DENSE_NAMES}
    content: dict[str, Any] = {"train": str(path), "label": LABEL, "dense": dense, "sparse": sparse}
    return DataSettings.model_validate(content | ({"split": {"by": "hash"}} if split else {}))


def read_row_groups(path: Path) -> None:
    with pq.ParquetFile(path, memory_map=True) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=COLUMNS)


def read_iter_batches(path: Path) -> None:
    with pq.ParquetFile(path, memory_map=True) as file:
        for _ in file.iter_batches(8192, columns=COLUMNS):
            pass


def ours(chosen: DataSettings, part: str, batch_size: int, shuffle: bool) -> Callable[[], None]:
    batches = ParquetBatches(chosen, Encoding.fit(chosen), part, batch_size, shuffle=shuffle)  # type: ignore[arg-type]

    def epoch() -> None:
        for _ in batches:
            pass

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the generated file (2000000)")
    parser.add_argument("--null-rate", type=float, default=0.0, help="share of nulls in every column (0)")
    parser.add_argument("--batch-size", type=int, default=8192, help="rows per batch (8192)")
    parser.add_argument("--rounds", type=int, default=7, help="times each contender reads the file (7)")
    options = parser.parse_args()
    path = make_file(options.rows, options.null_rate)
    plain, full = settings(path, "none", split=False), settings(path, "log1p", split=True)
    seconds = alternate(
        {
            CEILING: lambda: read_row_groups(path),
            "iter_batches(8192)": lambda: read_iter_batches(path),
            "ours": ours(plain, "all", options.batch_size, shuffle=False),
            "ours, log1p": ours(settings(path, "log1p", split=False), "all", options.batch_size, shuffle=False),
            "ours, log1p, 80% split, shuffled": ours(full, "train", options.batch_size, shuffle=True),
        },
        options.rounds,
    )
    table = Table(
        "contender", "M rows/s", "of the ceiling", title=f"{options.rows:,} rows, batches of {options.batch_size}"
    )
    figures: dict[str, Any] = {
        "rows": options.rows,
        "null_rate": options.null_rate,
        "batch_size": options.batch_size,
        "contenders": {},
    }
    for name, times in seconds.items():
        rate, share = options.rows / statistics.median(times), 1 / median_ratio(times, seconds[CEILING])
        table.add_row(name, f"{rate / 1e6:.2f}", f"{share:.0%}")
        figures["contenders"][name] = {"rows_per_second": rate, "share_of_ceiling": share, "seconds": times}
    Console().print(table)
    suffix = f"-nulls-{options.null_rate:g}" if options.null_rate else ""
    print(f"Wrote {write_report(f'data_loading{suffix}', figures)}")


if __name__ == "__main__":
    main()
