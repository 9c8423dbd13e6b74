"""Run by test_backends.py, in a process of its own: Triton's interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings
from tests.embedding.reference_tables import ReferenceBagCollection
from tests.embedding.test_cache_exactness import delayed, evaluate
from tests.embedding.test_exactness import OPTIMIZERS, random_batch


@settings(max_examples=12)
@given(data=st.data())
def test_training_through_triton_slots_equals_resident_tables(data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**32 - 1), "seed")
    optimizer = draw(st.sampled_from(OPTIMIZERS), "optimizer")
    dim = draw(st.sampled_from([1, 3, 8]), "dim")
    weighted = draw(st.booleans(), "weighted")
    depth = draw(st.integers(0, 8), "depth")
    transfer = draw(st.sampled_from(["auto", "staging", "zero_copy"]), "transfer")
    size = draw(st.sampled_from([1, "10%", "50%"]), "size")
    random = np.random.default_rng(seed)
    configs = [
        EmbeddingBagConfig(60, dim, "users", feature_names=["user", "twin"], pooling=PoolingType.SUM),
        EmbeddingBagConfig(40, dim, "things", feature_names=["item"], pooling=PoolingType.MEAN),
    ]
    keys = {"user": 60, "twin": 60, "item": 40}
    chosen = SparseOptimizerSettings(name=optimizer, learning_rate=0.1, weight_decay=draw(st.sampled_from([0.0, 0.01])))
    collection = HostEmbeddingBagCollection(
        configs,
        weighted,
        optimizer=chosen,
        placements=dict.fromkeys(["users", "things"], "cached"),
        cache=CacheSettings(size=size, kernels="triton", transfer=transfer),
        threads=1,
    )
    resident = ReferenceBagCollection(collection, chosen)
    batches = [random_batch(random, keys, 8, 2, 2.0, weighted) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        if draw(st.booleans(), "delays"):
            delayed(patch, seed)
        for batch in prefetch(batches, collection, depth):
            output = collection(batch).values()
            assert torch.equal(output, resident.forward(batch))
            gradient = torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32))
            output.backward(gradient)
            resident.backward(batch, gradient, 0.1)
            if random.random() < 0.3:
                evaluate(collection, resident, batches[0])
        collection.flush()
    resident.assert_equal(collection)
