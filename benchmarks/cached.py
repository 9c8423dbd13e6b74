"""What a cache costs where there is nothing to gain: cached against host placement, both on the host.

    python benchmarks/cached.py

Without an accelerator the slots are host memory as well, so that all the work of the cache (planning, moving rows
there and back) comes on top, and shares the cores with the training. DLRM on Criteo-like Parquet as in throughput.py,
read in the loop, through ``prefetch``. Expected: with 10% of the rows cached and 4 batches known ahead at most 10%
slower than host placement, and under 2% of the time spent waiting for rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import recsys_offload  # noqa: F401 - first: it sets how OpenMP's idle threads wait, which torch reads when it is loaded

# isort: split
import torch
from common import alternate, median_ratio, write_report
from rich.console import Console
from rich.table import Table
from throughput import LEARNING_RATE, Contender, click_log_folder, contender, endless
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.data import DataSettings, Encoding, ParquetBatches
from recsys_offload.data.criteo import SCHEMAS, SPARSE_COLUMNS, SPARSE_NAMES
from recsys_offload.data.synthetic import data_settings
from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings
from recsys_offload.embedding.statistics import CacheCounts

HOST = "host"


def build(options: argparse.Namespace, size: str | None) -> tuple[Contender, HostEmbeddingBagCollection]:
    """The model with its tables on the host, or a share of their rows cached."""
    tables = [EmbeddingBagConfig(options.rows, options.dim, name, feature_names=[name]) for name in SPARSE_NAMES]
    collection = HostEmbeddingBagCollection(
        tables,
        optimizer=SparseOptimizerSettings(name=options.optimizer, learning_rate=LEARNING_RATE),
        placements=dict.fromkeys(SPARSE_NAMES, "host" if size is None else "cached"),
        cache=CacheSettings(size=size or "10%"),
        threads=torch.get_num_threads(),
    )
    return contender(collection, [collection.optimizer], []), collection


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = click_log_folder(options.rows, options.examples)
    schema = replace(SCHEMAS["criteo-kaggle"], cardinalities=(options.rows,) * SPARSE_COLUMNS)
    settings = DataSettings(**data_settings(schema, str(folder / "*.parquet")))
    reader = ParquetBatches(settings, Encoding.fit(settings), "all", options.batch_size, shuffle=True, drop_last=True)
    stream = endless(reader)
    built = {HOST: build(options, None)} | {f"cached {size}": build(options, size) for size in options.sizes.split(",")}
    losses: dict[str, list[float]] = {name: [] for name in built}

    def block(name: str) -> Callable[[], None]:
        model = built[name][0]

        def run() -> None:  # with the pipeline empty at the beginning and at the end, as in no long run
            batches = prefetch(islice(stream, options.block_steps), model.model, options.depth)
            losses[name].extend(model.step(batch) for batch in batches)

        return run

    counts: dict[str, CacheCounts] = {}

    def note_counts() -> None:
        counts.update({name: collection.statistics.counts() for name, (_, collection) in built.items()})

    blocks = {name: block(name) for name in built}
    try:
        alternate(blocks, options.warmup, warmup=0)  # fills the caches
        note_counts()
        before = dict(counts)
        seconds = alternate(blocks, options.rounds, warmup=0)
        note_counts()
    finally:
        stream.close()
        reader.close()
    steps = options.rounds * options.block_steps
    results = {}
    for name in built:
        did = counts[name].since(before[name])
        results[name] = {
            "ms_per_step": 1e3 * statistics.median(seconds[name]) / options.block_steps,
            "time_over_host": median_ratio(seconds[name], seconds[HOST]),
            "hit_rate": did.hit_rate,
            "stalled_share": did.stalled_seconds / sum(seconds[name]),
            "moving_share": did.moving_seconds / sum(seconds[name]),
            "fetched_bytes_per_step": did.fetched_bytes / steps,
            "written_back_bytes_per_step": did.written_back_bytes / steps,
            "last_losses": statistics.mean(losses[name][-steps // 2 :]),
            "block_seconds": seconds[name],
        }
    return {"settings": vars(options), "threads": torch.get_num_threads(), "skew": 1.05, "contenders": results}


def show(figures: dict[str, Any]) -> None:
    settings = figures["settings"]
    table = Table(
        title=f"DLRM, {SPARSE_COLUMNS} tables x {settings['rows']:,} rows x dim {settings['dim']}, batch "
        f"{settings['batch_size']}, {settings['optimizer']}, {settings['depth']} batches known ahead, "
        f"{figures['threads']} threads"
    )
    table.add_column("placement")
    for column in ("ms/step", "time / host", "hits", "waiting for rows", "rows moving", "MB moved per step", "loss"):
        table.add_column(column, justify="right")
    for name, result in figures["contenders"].items():
        moved = result["fetched_bytes_per_step"] + result["written_back_bytes_per_step"]
        cache = ("", "", "", "")
        if name != HOST:
            cache = (
                f"{result['hit_rate']:.1%}",
                f"{result['stalled_share']:.2%}",
                f"{result['moving_share']:.1%}",
                f"{moved / 1e6:.1f}",
            )
        row = (f"{result['ms_per_step']:.1f}", f"{result['time_over_host']:.3f}x", *cache)
        table.add_row(name, *row, f"{result['last_losses']:.4f}")
    console = Console(width=None if Console().is_terminal else 130)
    console.print(table)
    console.print("Medians over blocks; the ratio is a median of ratios within a round. Shares are of the step's time.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default="5%,10%,25%", help="of the cache, as shares of the rows (5%%,10%%,25%%)")
    add("--depth", type=int, default=4, help="batches that are known ahead (4)")
    add("--rounds", type=int, default=12, help="blocks per contender (12)")
    add("--warmup", type=int, default=4, help="blocks before those (4)")
    add("--block-steps", type=int, default=30, help="steps in a block (30)")
    add("--batch-size", type=int, default=2048, help="examples per step (2048)")
    add("--rows", type=int, default=100_000, help="rows per table (100000)")
    add("--dim", type=int, default=64, help="width of the tables (64)")
    add("--examples", type=int, default=1_000_000, help="rows of the generated Parquet files (1000000)")
    add("--optimizer", choices=["adagrad", "rowwise_adagrad", "sgd", "adam"], default="adagrad", help="(adagrad)")
    add("--quick", action="store_true", help="a smaller set and fewer steps, to see that it works; nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.warmup, options.block_steps = 2, 1, 10
        options.rows, options.examples, options.sizes = 10_000, 200_000, "50%"
    figures = measure(options)
    show(figures)
    if not options.quick:
        print(f"Wrote {write_report('cached', figures)}")


if __name__ == "__main__":
    main()
