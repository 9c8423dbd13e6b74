"""What embedding tables cost a training step: ours, TorchRec's fused collection, nn.EmbeddingBag, and no tables at all.

    python benchmarks/throughput.py

The same DLRM on the same Parquet files, read in the loop; the contenders take turns in blocks of steps. The figure to
quote is the embedding tax: the step time over that of the dense tower alone, minus one (median over rounds).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import recsys_offload  # noqa: F401 - first: it sets how OpenMP's idle threads wait, which torch reads when it is loaded

# isort: split
import torch
import torchrec
from common import RESULTS, alternate, median_ratio, write_report
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys_offload.data import Batch, DataSettings, Encoding, ParquetBatches
from recsys_offload.data.click_log import ClickLog
from recsys_offload.data.criteo import DENSE_COLUMNS, SCHEMAS, SPARSE_COLUMNS, SPARSE_NAMES
from recsys_offload.data.synthetic import GENERATOR_FILE, data_settings, write
from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings

DATA = Path(__file__).resolve().parent.parent / "data"
LEARNING_RATE = 0.01
BLOCK_STEPS = 5
OURS, FUSED, BAGS, TOWER = "ours", "TorchRec fused", "nn.EmbeddingBag(sparse=True)", "dense tower alone"
FUSED_OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": torchrec.optim.RowWiseAdagrad}


class SparseBags(nn.Module):
    """`nn.EmbeddingBag` per table, with sparse gradients, behind the interface that TorchRec's models expect."""

    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; saying so silences a warning
        self._tables = tables
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode="sum", sparse=True) for table in tables
        )
        for bag in self.bags:
            bound = bag.num_embeddings**-0.5
            nn.init.uniform_(bag.weight, -bound, bound)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = []
        for table, bag in zip(self._tables, self.bags, strict=True):
            feature = features[table.feature_names[0]]
            pooled.append(bag(feature.values(), feature.offsets()[:-1]))
        names = [table.feature_names[0] for table in self._tables]
        return KeyedTensor(names, [table.embedding_dim for table in self._tables], torch.cat(pooled, dim=1))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables


class RandomPooled(nn.Module):
    """Stands for the tables: the same random pooled embeddings for every batch, with a gradient as real ones have."""

    def __init__(self, tables: list[EmbeddingBagConfig], batch_size: int) -> None:
        super().__init__()
        self._tables = tables
        self._pooled = torch.randn(batch_size, sum(table.embedding_dim for table in tables)).mul_(0.01)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = self._pooled.detach().requires_grad_()
        names = [table.feature_names[0] for table in self._tables]
        return KeyedTensor(names, [table.embedding_dim for table in self._tables], pooled)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables


@dataclass
class Contender:
    """A model, the optimizers that its step calls, and the bytes of its tables with their optimizer's state."""

    model: DLRM
    optimizers: list[torch.optim.Optimizer]
    table_bytes: int

    def step(self, batch: Batch) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        logits = self.model(batch.dense, batch.sparse).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()


def contender(
    collection: nn.Module, sparse_optimizers: list[torch.optim.Optimizer], table_tensors: list[Tensor]
) -> Contender:
    """DLRM over a collection. The dense part is the same for all, its initial values too."""
    torch.manual_seed(0)
    dim = collection.embedding_bag_configs()[0].embedding_dim
    model = DLRM(collection, DENSE_COLUMNS, [512, 256, dim], [512, 512, 256, 1])
    dense = torch.optim.Adagrad([*model.dense_arch.parameters(), *model.over_arch.parameters()], lr=LEARNING_RATE)
    table_bytes = sum(tensor.numel() * tensor.element_size() for tensor in table_tensors)
    return Contender(model, [dense, *sparse_optimizers], table_bytes)


def ours(tables: list[EmbeddingBagConfig], optimizer: Literal["adagrad", "rowwise_adagrad"]) -> Contender:
    settings = SparseOptimizerSettings(name=optimizer, learning_rate=LEARNING_RATE)
    collection = HostEmbeddingBagCollection(tables, optimizer=settings, threads=torch.get_num_threads())
    host = collection.tables
    states = [state for name in host.names for state in host.optimizer_state(name).values()]
    return contender(collection, [], [*(host.weight(name) for name in host.names), *states])


def fused(tables: list[EmbeddingBagConfig], optimizer: str) -> Contender:
    collection = FusedEmbeddingBagCollection(tables, FUSED_OPTIMIZERS[optimizer], {"lr": LEARNING_RATE})
    (lookup,) = collection._emb_modules  # all tables have the same pooling and type: they are one FBGEMM module
    states = [state for states in lookup._emb_module.split_optimizer_states() for state in states]
    return contender(collection, [], [*lookup.split_embedding_weights(), *states])


def sparse_bags(tables: list[EmbeddingBagConfig]) -> Contender:
    collection = SparseBags(tables)
    adagrad = torch.optim.Adagrad(collection.parameters(), lr=LEARNING_RATE)
    states = [adagrad.state[weight]["sum"] for weight in collection.parameters()]
    return contender(collection, [adagrad], [*collection.parameters(), *states])


def click_log_folder(rows_per_table: int, examples: int) -> Path:
    """The folder of the generated data set, made first where it is absent or was made otherwise."""
    schema = replace(SCHEMAS["criteo-kaggle"], cardinalities=(rows_per_table,) * SPARSE_COLUMNS)
    log, files, row_group_rows = ClickLog(schema, skew=1.05), 4, 65536
    folder = DATA / f"throughput-{rows_per_table}-{examples}"
    wanted = {**asdict(log), "rows": examples, "files": files, "row_group_rows": row_group_rows}
    try:
        found = json.loads((folder / GENERATOR_FILE).read_text())
    except FileNotFoundError:
        found = {}
    if {name: found.get(name) for name in wanted} != json.loads(json.dumps(wanted)):
        shutil.rmtree(folder, ignore_errors=True)
        write(log, folder, examples, files, row_group_rows, on_rows=lambda rows: None)
    return folder


def endless(batches: ParquetBatches) -> Iterator[Batch]:
    """Batches of one epoch after the other."""
    while True:
        yield from batches


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = click_log_folder(options.rows, options.examples)
    schema = replace(SCHEMAS["criteo-kaggle"], cardinalities=(options.rows,) * SPARSE_COLUMNS)
    settings = DataSettings(**data_settings(schema, str(folder / "*.parquet")))
    encoding = Encoding.fit(settings)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=options.dim, num_embeddings=options.rows, feature_names=[name])
        for name in SPARSE_NAMES
    ]
    contenders = {
        OURS: ours(tables, options.optimizer),
        FUSED: fused(tables, options.optimizer),
        BAGS: sparse_bags(tables),
        TOWER: contender(RandomPooled(tables, options.batch_size), [], []),
    }
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    reader = ParquetBatches(settings, encoding, "all", options.batch_size, shuffle=True, drop_last=True)
    stream = endless(reader)

    def block(name: str) -> Callable[[], None]:
        def run() -> None:
            losses[name].extend(contenders[name].step(next(stream)) for _ in range(BLOCK_STEPS))

        return run

    def collection_block(name: str) -> Callable[[], None]:
        collection = contenders[name].model.sparse_arch.embedding_bag_collection
        gradient = torch.randn(options.batch_size, SPARSE_COLUMNS * options.dim).mul_(0.01)

        def run() -> None:
            for _ in range(BLOCK_STEPS):
                collection(next(stream).sparse).values().backward(gradient)

        return run

    def read_block() -> None:
        for _ in range(BLOCK_STEPS):
            next(stream)

    try:
        rounds = max(1, options.steps // BLOCK_STEPS)
        seconds = alternate({name: block(name) for name in contenders}, rounds)
        # By itself, at the pace it has when nothing else runs.
        reading = alternate({"reading": read_block}, rounds, warmup=2)["reading"]
        alone = alternate({name: collection_block(name) for name in (OURS, FUSED)}, rounds, warmup=2)
    finally:
        stream.close()
        reader.close()
    results = {}
    for name in contenders:
        step = statistics.median(seconds[name]) / BLOCK_STEPS
        results[name] = {
            "ms_per_step": 1e3 * step,
            "samples_per_second": options.batch_size / step,
            "embedding_tax": median_ratio(seconds[name], seconds[TOWER]) - 1.0,
            "time_over_ours": median_ratio(seconds[name], seconds[OURS]),
            "table_bytes": contenders[name].table_bytes,
            "last_losses": statistics.mean(losses[name][-len(losses[name]) // 2 :]),
            "block_seconds": seconds[name],
        }
    read_ms = 1e3 * sum(reading) / (rounds * BLOCK_STEPS)
    return {
        "settings": {name: value for name, value in vars(options).items() if name != "quick"},
        "skew": 1.05,
        "threads": torch.get_num_threads(),
        "reading_alone_ms_per_batch": read_ms,
        "collections_alone_ms": {name: 1e3 * statistics.median(times) / BLOCK_STEPS for name, times in alone.items()},
        "collections_alone_fused_over_ours": median_ratio(alone[FUSED], alone[OURS]),
        "contenders": results,
    }


def show(figures: dict[str, Any]) -> None:
    settings = figures["settings"]
    title = (
        f"DLRM, {SPARSE_COLUMNS} tables x {settings['rows']:,} rows x dim {settings['dim']}, batch "
        f"{settings['batch_size']}, {settings['optimizer']}, fp32, {figures['threads']} threads"
    )
    table = Table(title=title)
    table.add_column("tables")
    for column in ("ms/step", "samples/s", "embedding tax", "time / ours", "tables + state", "loss"):
        table.add_column(column, justify="right")
    for name, result in figures["contenders"].items():
        table.add_row(
            name,
            f"{result['ms_per_step']:.1f}",
            f"{result['samples_per_second']:,.0f}",
            "" if name == TOWER else f"{result['embedding_tax']:+.1%}",
            f"{result['time_over_ours']:.2f}x",
            f"{result['table_bytes'] / 2**20:,.0f} MiB",
            f"{result['last_losses']:.4f}",
        )
    alone = figures["collections_alone_ms"]
    console = Console(width=None if Console().is_terminal else 130)
    console.print(table)
    console.print(
        f"Medians over rounds of {BLOCK_STEPS} steps; tax and ratios are medians of ratios within a round. Reading is "
        f"part of every step; by itself it takes {figures['reading_alone_ms_per_batch']:.2f} ms per batch."
    )
    console.print(
        f"The collections alone, forward and backward with the update: ours {alone[OURS]:.1f} ms, TorchRec's fused "
        f"{alone[FUSED]:.1f} ms, {figures['collections_alone_fused_over_ours']:.2f}x."
    )


def plot(figures: dict[str, Any], path: Path) -> None:
    results = figures["contenders"]
    names = list(results)[::-1]
    times = [results[name]["ms_per_step"] for name in names]
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, times, color=["#9aa5b1" if name != OURS else "#2a6fdb" for name in names])
    labels = [
        f"{time:.0f} ms" + ("" if name == TOWER else f"  ({results[name]['embedding_tax']:+.0%})")
        for name, time in zip(names, times, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4)
    axes.axvline(results[TOWER]["ms_per_step"], color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.3 * max(times))
    axes.set_xlabel("ms per step (and embedding tax over the dense tower alone)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="timed steps per contender (100)")
    add("--batch-size", type=int, default=2048, help="examples per step (2048)")
    add("--rows", type=int, default=100_000, help="rows per table (100000)")
    add("--dim", type=int, default=64, help="width of the tables (64)")
    add("--examples", type=int, default=1_000_000, help="rows of the generated Parquet files (1000000)")
    add("--optimizer", choices=list(FUSED_OPTIMIZERS), default="adagrad", help="nn.EmbeddingBag always has adagrad")
    add("--threads", type=int, help="of the towers and the tables (one per core)")
    add("--quick", action="store_true", help="a smaller set and fewer steps, to see that it works; nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rows, options.examples = 20, 10_000, 200_000
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    figures = measure(options)
    show(figures)
    if not options.quick:
        suffix = "" if options.optimizer == "adagrad" else f"-{options.optimizer}"
        report = write_report(f"throughput{suffix}", figures)
        plot(figures, RESULTS / f"throughput{suffix}.png")
        print(f"Wrote {report} and {report.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
