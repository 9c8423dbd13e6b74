"""The rules that DESIGN.md names against hazards: with all of them training is exact, and without any one it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.cache import DeviceCache
from recsys_offload.embedding.config import CacheSettings
from recsys_offload.embedding.directory import Directory
from recsys_offload.embedding.transfer import HostTransfer
from recsys_offload.embedding.transfer_device import StagedTransfer, _Ring
from tests.embedding.reference_tables import ReferenceBagCollection
from tests.embedding.simulated_device import simulate_device
from tests.embedding.test_cache_exactness import evaluate
from tests.embedding.test_exactness import random_batch

LANES = {"host lane": ("auto", "auto"), "staging": ("torch", "staging")}
# A rule's absence shows within so many runs, each with other delays.
RUNS = 12
# In the smaller cache every batch replaces rows; the larger one has room for several batches whose rows only come.
SIZES = ["15%", "60%"]


def train(seed: int, lane: str, size: str) -> None:
    """Two epochs on a device that lags; fails where an output or a table differs from plain torch's."""
    random = np.random.default_rng(seed)
    optimizer = SparseOptimizerSettings(name="adagrad", learning_rate=0.1)
    keys = {"user": 200, "item": 60}
    kernels, transfer = LANES[lane]
    collection = HostEmbeddingBagCollection(
        [
            EmbeddingBagConfig(200, 4, "users", feature_names=["user"]),
            EmbeddingBagConfig(60, 8, "items", feature_names=["item"]),
        ],
        optimizer=optimizer,
        placements={"users": "cached", "items": "cached"},
        cache=CacheSettings(size=size, kernels=kernels, transfer=transfer),
        threads=1,
    )
    resident = ReferenceBagCollection(collection, optimizer)
    batches = [random_batch(random, keys, 9, 2, 1.0, False) for _ in range(8)]
    for _ in range(2):
        for step, batch in enumerate(prefetch(batches, collection, 4)):
            output = collection(batch).values()
            assert torch.equal(output, resident.forward(batch))
            gradient = torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32))
            output.backward(gradient)
            resident.backward(batch, gradient, 0.1)
            if step == 5:
                evaluate(collection, resident, batches[0])
            elif step == 6:
                collection.flush()
                resident.assert_equal(collection)
    collection.flush()
    resident.assert_equal(collection)


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    admit = Directory.admit
    patch.setattr(
        Directory, "admit", lambda self, rows, number, oldest, coming=(): admit(self, rows, number, number, coming)
    )
    patch.setattr(DeviceCache, "has_room_ahead", lambda self, ticket, batches_ahead: True)


def fetch_before_the_write_back_has_arrived(patch: pytest.MonkeyPatch) -> None:
    finish, drain = StagedTransfer._finish_write_back, StagedTransfer.drain
    draining = False

    def finish_when_draining(self: StagedTransfer) -> None:
        if draining:
            finish(self)

    def drain_all(self: StagedTransfer) -> None:
        nonlocal draining
        draining = True
        drain(self)
        draining = False

    patch.setattr(StagedTransfer, "_finish_write_back", finish_when_draining)
    patch.setattr(StagedTransfer, "drain", drain_all)


def use_buffers_again_at_once(patch: pytest.MonkeyPatch) -> None:
    guard = _Ring.guard

    def unguarded(self: _Ring, copied: Any) -> None:
        guard(self, copied)
        self._copied = [None] * len(self._copied)

    patch.setattr(_Ring, "guard", unguarded)


def do_not_drain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTransfer, "drain", lambda self: None)
    patch.setattr(StagedTransfer, "drain", lambda self: None)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No rule but that a stream waits for events is removed."""


@pytest.mark.parametrize("lane", LANES)
def test_with_all_rules_a_device_that_lags_trains_to_the_bits_of_resident_tables(lane: str) -> None:
    for seed in range(RUNS):
        for size in SIZES:
            with pytest.MonkeyPatch.context() as patch:
                simulate_device(patch, seed)
                train(seed, lane, size)


@pytest.mark.parametrize(
    ("lane", "remove", "ignoring"),
    [
        pytest.param("host lane", hold_nothing, (), id="rows of planned batches are held"),
        pytest.param("host lane", nothing, ("compute",), id="compute waits for the rows"),
        pytest.param("host lane", nothing, ("move rows",), id="write-back waits for the last update"),
        pytest.param("host lane", do_not_drain, (), id="a flush drains"),
        pytest.param("staging", hold_nothing, (), id="staging: rows of planned batches are held"),
        pytest.param("staging", nothing, ("compute",), id="staging: compute waits for the rows"),
        pytest.param("staging", nothing, ("write back",), id="staging: write-back waits for the last update"),
        pytest.param("staging", nothing, ("fetch",), id="staging: a slot is read before it is overwritten"),
        pytest.param(
            "staging", fetch_before_the_write_back_has_arrived, (), id="staging: a fetch waits for the write-back"
        ),
        pytest.param("staging", use_buffers_again_at_once, (), id="staging: buffers are guarded"),
        pytest.param("staging", do_not_drain, (), id="staging: a flush drains"),
    ],
)
def test_without_one_rule_training_goes_wrong(
    lane: str, remove: Callable[[pytest.MonkeyPatch], None], ignoring: tuple[str, ...]
) -> None:
    for seed in range(RUNS):
        for size in SIZES:
            with pytest.MonkeyPatch.context() as patch:
                simulate_device(patch, seed, frozenset(ignoring))
                remove(patch)
                try:
                    train(seed, lane, size)
                except AssertionError:
                    return
    pytest.fail(f"{RUNS} runs without the rule were exact: the tests would not notice that it is missing")
