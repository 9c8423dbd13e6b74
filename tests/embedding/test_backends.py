"""What may compute over the slots, and move rows to them, other than the host's kernels and the host's lane."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from recsys_offload.embedding import (
    HostCollection,
    HostEmbeddingBagCollection,
    SparseOptimizerSettings,
    host_memory,
    prefetch,
)
from recsys_offload.embedding.config import CacheSettings, OptimizerName
from recsys_offload.embedding.modules import HostEmbeddingCollection
from tests.embedding.test_exactness import random_batch

KEYS = {"user": 90, "twin": 90, "item": 40}


def bag_collection(placement: str, cache: CacheSettings, optimizer: OptimizerName, weighted: bool) -> HostCollection:
    configs = [
        EmbeddingBagConfig(90, 8, "users", feature_names=["user", "twin"], pooling=PoolingType.SUM),
        EmbeddingBagConfig(
            40, 8, "things", feature_names=["item"], pooling=PoolingType.SUM if weighted else PoolingType.MEAN
        ),
    ]
    return HostEmbeddingBagCollection(
        configs,
        weighted,
        optimizer=SparseOptimizerSettings(name=optimizer, learning_rate=0.1),
        placements=dict.fromkeys(["users", "things"], placement),
        cache=cache,
        threads=1,
    )


def row_collection(placement: str, cache: CacheSettings) -> HostCollection:
    configs = [
        EmbeddingConfig(90, 8, "users", feature_names=["user", "twin"]),
        EmbeddingConfig(40, 8, "things", feature_names=["item"]),
    ]
    return HostEmbeddingCollection(
        configs,
        optimizer=SparseOptimizerSettings(name="adagrad", learning_rate=0.1),
        placements=dict.fromkeys(["users", "things"], placement),
        cache=cache,
        threads=1,
    )


def outputs(collection: HostCollection, batch: object) -> Tensor:
    result = collection(batch)
    if isinstance(result, dict):
        return torch.cat([jagged.values() for jagged in result.values()])
    return result.values()


def train(collection: HostCollection, weighted: bool = False, depth: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    """All outputs of two epochs, and the tables with their state afterwards."""
    random = np.random.default_rng(5)
    batches = [random_batch(random, KEYS, 12, 3, 2.0, weighted) for _ in range(8)]
    seen = []
    for epoch in range(2):
        for step, batch in enumerate(prefetch(batches, collection, depth)):
            collection.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step + epoch)
            output = outputs(collection, batch)
            seen.append(output.detach().clone())
            output.backward(torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32)))
        collection.eval()
        with torch.no_grad():
            seen.append(outputs(collection, batches[epoch]).clone())
        collection.train()
    collection.flush()
    tables = {name: collection.tables.weight(name).clone() for name in collection.tables.names}
    for name in collection.tables.names:
        for key, value in collection.tables.optimizer_state(name).items():
            tables[f"{name}.{key}"] = value.clone()
    return seen, tables


def assert_equal(one: tuple[list[Tensor], dict[str, Tensor]], two: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert one[1].keys() == two[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, two[1][name]), name


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("transfer", ["auto", "staging"])
def test_fbgemm_trains_a_cache_to_the_bits_of_its_resident_table(
    optimizer: OptimizerName, weighted: bool, transfer: str
) -> None:
    cached = bag_collection(
        "cached", CacheSettings(size="70%", kernels="fbgemm", transfer=transfer), optimizer, weighted
    )
    resident = bag_collection("device", CacheSettings(kernels="fbgemm"), optimizer, weighted)
    trained = train(cached, weighted)
    assert cached.statistics.counts().written_back > 0
    assert_equal(trained, train(resident, weighted))
    ours = train(bag_collection("host", CacheSettings(), optimizer, weighted), weighted)
    for name, tensor in ours[1].items():  # the same mathematics, in another order
        torch.testing.assert_close(trained[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_fbgemm_gives_the_row_of_every_id() -> None:
    cache = CacheSettings(size="70%", kernels="fbgemm")
    assert_equal(train(row_collection("cached", cache)), train(row_collection("device", cache)))


def test_fbgemm_slots_grow() -> None:
    small = bag_collection("cached", CacheSettings(size=5, kernels="fbgemm"), "adagrad", False)
    trained = train(small)
    assert small.statistics.counts().grown > 0
    assert_equal(trained, train(bag_collection("device", CacheSettings(kernels="fbgemm"), "adagrad", False)))


@pytest.mark.parametrize("transfer", ["auto", "staging"])
def test_plain_torch_gives_the_host_kernels_bits_for_the_row_of_every_id(transfer: str) -> None:
    cached = row_collection("cached", CacheSettings(size="70%", kernels="torch", transfer=transfer))
    assert_equal(train(cached), train(row_collection("host", CacheSettings())))


def test_triton_and_zero_copy_give_the_host_kernels_bits_in_the_interpreter() -> None:
    checks = Path(__file__).with_name("triton_checks.py")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(checks)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (CacheSettings(kernels="triton"), "triton needs a GPU; take auto, or set TRITON_INTERPRET=1"),
        (CacheSettings(transfer="zero_copy"), "zero_copy is done by Triton kernels"),
        (CacheSettings(transfer="zero_copy", kernels="torch"), "zero_copy is done by Triton kernels"),
        (CacheSettings(transfer="staging"), "staging goes to slots in device memory"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(cache: CacheSettings, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        bag_collection("cached", cache, "adagrad", False)


@pytest.mark.parametrize(
    ("dim", "optimizer", "message"),
    [
        (6, SparseOptimizerSettings(name="sgd"), "multiple of 4, not 6"),
        (8, SparseOptimizerSettings(name="adam"), "no adam like ours"),
        (8, SparseOptimizerSettings(name="sgd", weight_decay=0.1), "weight_decay"),
    ],
)
def test_what_fbgemm_cannot_do_is_refused(dim: int, optimizer: SparseOptimizerSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostEmbeddingBagCollection(
            [EmbeddingBagConfig(9, dim, "users", feature_names=["user"])],
            optimizer=optimizer,
            placements={"users": "cached"},
            cache=CacheSettings(kernels="fbgemm"),
        )


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it can be pinned")
    array = host_memory.allocate((4, 3), np.dtype(np.float32), "a test", pin=True)
    assert not host_memory.is_registered(array) and array.shape == (4, 3)
    assert "could not be pinned" in caplog.text and "half the bus's speed" in caplog.text
