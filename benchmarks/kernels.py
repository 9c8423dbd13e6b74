"""What lookup and fused update cost on the host, against FBGEMM's CPU kernel.

26 tables x 400,000 rows x dim 64, batch 2048, one id per bag, row-wise Adagrad. One block is plan, forward, backward
and update of several batches; ours goes through the module and autograd, as FBGEMM's does. Expected: at most 0.6x
of FBGEMM's time on Zipf ids (exponent 1.05); a prototype reached 0.5x, and 0.6x on uniform ids.

    python benchmarks/kernels.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import alternate, median_ratio, write_report
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload import HostEmbeddingBagCollection, SparseOptimizerSettings

OURS, FBGEMM = "ours", "FBGEMM"
LEARNING_RATE = 0.01


def make_ids(skew: float, options: argparse.Namespace, seed: int) -> list[Tensor]:
    """Batches of ids, int64 ``[tables * batch_size]``; the frequent ids of each table lie anywhere in it."""
    random = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, options.rows + 1, dtype=np.float64) ** -skew)
    places = [random.permutation(options.rows) for _ in range(options.tables)]
    batches = []
    for _ in range(options.batches):
        ranks = [
            np.searchsorted(cumulative, random.random(options.batch_size) * cumulative[-1])
            for _ in range(options.tables)
        ]
        ids = np.concatenate([place[rank] for place, rank in zip(places, ranks, strict=True)])
        batches.append(torch.from_numpy(ids.astype(np.int64)))
    return batches


def ours(options: argparse.Namespace, gradient: Tensor) -> Callable[[Tensor], None]:
    keys = [f"feature_{index}" for index in range(options.tables)]
    configs = [EmbeddingBagConfig(options.rows, options.dim, key, feature_names=[key]) for key in keys]
    settings = SparseOptimizerSettings(name="rowwise_adagrad", learning_rate=LEARNING_RATE)
    collection = HostEmbeddingBagCollection(configs, optimizer=settings, threads=torch.get_num_threads())
    bags = options.tables * options.batch_size
    lengths, offsets = torch.ones(bags, dtype=torch.int64), torch.arange(bags + 1)

    def train(ids: Tensor) -> None:
        features = KeyedJaggedTensor(keys, ids, lengths=lengths, offsets=offsets, stride=options.batch_size)
        collection(features).values().backward(gradient)

    return train


def fbgemm(options: argparse.Namespace, gradient: Tensor) -> Callable[[Tensor], None]:
    tables = [(options.rows, options.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * options.tables
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        tables, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LEARNING_RATE
    )
    offsets = torch.arange(options.tables * options.batch_size + 1)

    def train(ids: Tensor) -> None:
        kernel(ids, offsets).backward(gradient)

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("tables", 26, "tables"),
        ("rows", 400_000, "rows per table"),
        ("dim", 64, "width of the tables"),
        ("batch-size", 2048, "bags per table"),
        ("batches", 10, "different batches in a block"),
        ("rounds", 25, "blocks of each contender"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--quick", action="store_true", help="small tables, to see that it works; nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds = 10_000, 3
    gradient = torch.randn(options.batch_size, options.tables * options.dim)
    contenders = {OURS: ours(options, gradient), FBGEMM: fbgemm(options, gradient)}
    table = Table("ids", "ours, ms", "FBGEMM, ms", "ratio", title="plan + forward + backward + update of one batch")
    figures: dict[str, Any] = {"settings": vars(options), "ids": {}}
    for name, skew in (("Zipf 1.05", 1.05), ("uniform", 0.0)):
        batches = make_ids(skew, options, seed=0)

        def block(train: Callable[[Tensor], None], batches: list[Tensor] = batches) -> Callable[[], None]:
            return lambda: [train(ids) for ids in batches] and None

        seconds = alternate({key: block(train) for key, train in contenders.items()}, options.rounds, warmup=2)
        per_batch = {key: statistics.median(times) / options.batches * 1e3 for key, times in seconds.items()}
        ratio = median_ratio(seconds[OURS], seconds[FBGEMM])
        table.add_row(name, f"{per_batch[OURS]:.2f}", f"{per_batch[FBGEMM]:.2f}", f"{ratio:.2f}")
        figures["ids"][name] = {"milliseconds": per_batch, "ratio": ratio, "seconds_per_block": seconds}
    Console().print(table)
    if not options.quick:
        print(f"Wrote {write_report('kernels', figures)}")


if __name__ == "__main__":
    main()
