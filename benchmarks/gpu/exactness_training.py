"""Small collections that are trained in the same way wherever their tables are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import (
    HostCollection,
    HostEmbeddingBagCollection,
    HostEmbeddingCollection,
    SparseOptimizerSettings,
    prefetch,
)
from recsys_offload.embedding.config import CacheSettings, OptimizerName

Kind = Literal["bags", "rows"]

LEARNING_RATE = 0.1
LONGEST_BAG = 3
# Two features read the tables that are summed, one reads those that are averaged.
FEATURES = ("user", "twin", "item")


@dataclass(frozen=True)
class TableSpec:
    """One table: its name says how it is pooled and how wide it is."""

    pooling: str
    dim: int

    @property
    def name(self) -> str:
        return f"{self.pooling}_{self.dim}"

    @property
    def features(self) -> list[str]:
        return ["item"] if self.pooling == "mean" else ["user", "twin"]


def table_specs(kind: Kind, dims: Sequence[int]) -> list[TableSpec]:
    """The tables of a collection of this kind."""
    poolings = ("sum", "mean") if kind == "bags" else ("unpooled",)
    return [TableSpec(pooling, dim) for dim in dims for pooling in poolings]


def make_collection(
    kind: Kind,
    specs: Sequence[TableSpec],
    rows: int,
    optimizer: OptimizerName,
    placement: Literal["device", "cached", "host"],
    cache: CacheSettings,
    device: torch.device,
) -> HostCollection:
    """A collection whose tables begin with the same values wherever they are."""
    chosen = SparseOptimizerSettings(name=optimizer, learning_rate=LEARNING_RATE)
    placements = {spec.name: placement for spec in specs}
    if kind == "rows":
        configs = [EmbeddingConfig(rows, spec.dim, spec.name, feature_names=spec.features) for spec in specs]
        return HostEmbeddingCollection(
            configs, optimizer=chosen, placements=placements, cache=cache, device=device, threads=2
        )
    bags = [
        EmbeddingBagConfig(
            rows, spec.dim, spec.name, feature_names=spec.features, pooling=PoolingType[spec.pooling.upper()]
        )
        for spec in specs
    ]
    return HostEmbeddingBagCollection(
        bags, optimizer=chosen, placements=placements, cache=cache, device=device, threads=2
    )


def make_batches(rows: int, batch_size: int, steps: int) -> list[KeyedJaggedTensor]:
    """Batches with bags of 0 to 3 ids, small ids more often; in the second, all users are the same one.

    With enough of them, that row's gradients are summed in chunks.
    """
    random = np.random.default_rng(1)
    batches = []
    for step in range(steps):
        lengths = random.integers(0, LONGEST_BAG + 1, len(FEATURES) * batch_size)
        ids = (rows * random.random(int(lengths.sum())) ** 2).astype(np.int64)
        if step == 1:
            ids[: int(lengths[: 2 * batch_size].sum())] = 1
        batches.append(
            KeyedJaggedTensor(list(FEATURES), torch.from_numpy(ids), lengths=torch.from_numpy(lengths.astype(np.int64)))
        )
    return batches


def train(collection: HostCollection, batches: Sequence[KeyedJaggedTensor], depth: int) -> None:
    """One epoch. Gradients depend on what was looked up: a lookup that is wrong leaves other tables behind."""
    random = np.random.default_rng(2)
    for batch in prefetch(batches, collection, depth):
        outputs = _outputs(collection, batch)
        gradients = []
        for output in outputs:
            noise = torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32))
            gradients.append(0.1 * output.detach() + noise.to(output.device))
        torch.autograd.backward(outputs, gradients)


def _outputs(collection: HostCollection, batch: KeyedJaggedTensor) -> list[Tensor]:
    result = collection(batch)
    return [jagged.values() for jagged in result.values()] if isinstance(result, dict) else [result.values()]
