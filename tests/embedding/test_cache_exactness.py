"""Training through the cache gives the same bits as plain torch with every table resident."""

from __future__ import annotations

import random as python_random
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings
from recsys_offload.embedding.directory import Directory
from recsys_offload.embedding.slots import HostSlots
from recsys_offload.embedding.slots_device import DeviceSlots
from tests.embedding.reference_tables import ReferenceBagCollection
from tests.embedding.test_exactness import OPTIMIZERS, random_batch

# What computes over the slots, and the lane that rows move in.
BACKENDS = [("auto", "auto"), ("auto", "auto"), ("torch", "auto"), ("torch", "staging")]


def delayed(monkeypatch: pytest.MonkeyPatch, seed: int, longest: float = 0.002) -> None:
    """Every lane takes a random while longer: planning, admission, fetches, write-backs, lookups and updates."""
    chance = python_random.Random(seed)

    def slow(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def with_delay(*arguments: Any, **keywords: Any) -> Any:
            if chance.random() < 0.3:
                time.sleep(chance.random() * longest)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, with_delay)

    slow(Directory, "admit")
    for name in ("read", "write", "lookup_pooled", "update"):
        slow(DeviceSlots, name)
    slow(HostSlots, "fetch")
    slow(HostSlots, "write_back")
    slow(HostSlots, "lookup_pooled")
    slow(HostSlots, "update")
    slow(HostEmbeddingBagCollection, "plan")


@settings(max_examples=120)
@given(data=st.data())
def test_training_through_the_cache_equals_resident_tables(data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**32 - 1), "seed")
    optimizer = draw(st.sampled_from(OPTIMIZERS), "optimizer")
    dims = draw(st.lists(st.sampled_from([1, 3, 8, 20]), min_size=1, max_size=3), "dims")
    rows = draw(st.integers(5, 400), "rows")
    batch_size = draw(st.integers(1, 40), "batch_size")
    longest = draw(st.integers(1, 4), "longest")
    skew = draw(st.floats(0, 8), "skew")
    depth = draw(st.integers(0, 8), "depth")
    threads = draw(st.integers(1, 3), "threads")
    weighted = draw(st.booleans(), "weighted")
    shared = draw(st.booleans(), "shared")
    mean = draw(st.booleans(), "mean")
    cache = draw(st.sampled_from([1, 20, "5%", "30%", "100%", "2KiB"]), "cache")
    epochs = draw(st.integers(1, 3), "epochs")
    steps = draw(st.integers(1, 12), "steps")
    delays = draw(st.booleans(), "delays")

    random = np.random.default_rng(seed)
    configs, keys, placements = [], {}, {}
    for index, dim in enumerate(dims):
        table_rows = rows + index
        names = [f"feature_{index}", f"twin_{index}"] if shared and index == 0 else [f"feature_{index}"]
        keys.update(dict.fromkeys(names, table_rows))
        pooling = PoolingType.MEAN if mean and index != 1 else PoolingType.SUM
        configs.append(EmbeddingBagConfig(table_rows, dim, f"table_{index}", feature_names=names, pooling=pooling))
        placements[f"table_{index}"] = draw(st.sampled_from(["cached", "cached", "cached", "device", "host"]))
    own_cache = placements["table_0"] == "cached" and draw(st.booleans(), "own cache")
    own = {"table_0": draw(st.sampled_from([3, "50%"]))} if own_cache else {}
    kernels, transfer = draw(st.sampled_from(BACKENDS), "backend")
    keys = dict(sorted(keys.items(), key=lambda _: random.random()))
    chosen = SparseOptimizerSettings(name=optimizer, learning_rate=0.1, weight_decay=draw(st.sampled_from([0.0, 0.01])))
    collection = HostEmbeddingBagCollection(
        configs,
        weighted,
        optimizer=chosen,
        seed=seed,
        threads=threads,
        placements=placements,
        cache=CacheSettings(size=cache, sizes=own, kernels=kernels, transfer=transfer),
    )
    resident = ReferenceBagCollection(collection, chosen)
    batches = [random_batch(random, keys, batch_size, longest, skew, weighted) for _ in range(steps)]
    with pytest.MonkeyPatch.context() as patch:
        if delays:
            delayed(patch, seed)
        for epoch in range(epochs):
            for step, batch in enumerate(prefetch(batches, collection, depth)):
                collection.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                output = collection(batch).values()
                assert torch.equal(output, resident.forward(batch))
                gradient = torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32))
                output.backward(gradient)
                resident.backward(batch, gradient, 0.1 / (step + 1))
                between = random.integers(0, 6)
                if between == 0:
                    evaluate(collection, resident, random_batch(random, keys, batch_size, longest, skew, weighted))
                elif between == 1:
                    collection.flush()
                    resident.assert_equal(collection)
                elif between == 2:
                    state = collection.state_dict()
                    for config in configs:
                        saved = state[f"embedding_bags.{config.name}.weight"]
                        assert torch.equal(saved, resident.weights[config.name])
                elif between == 3 and epoch == epochs - 1:
                    break
        collection.flush()
    resident.assert_equal(collection)


def evaluate(
    collection: HostEmbeddingBagCollection, resident: ReferenceBagCollection, batch: KeyedJaggedTensor
) -> None:
    collection.eval()
    with torch.no_grad():
        assert torch.equal(collection(batch).values(), resident.forward(batch))
    collection.train()
