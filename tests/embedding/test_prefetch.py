"""The look-ahead pipeline as its user sees it: loops of all kinds, errors, positions, and threads that end."""

from __future__ import annotations

import gc
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, InvalidIdError, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.cache import CacheTooSmallError
from recsys_offload.embedding.config import CacheSettings
from tests.embedding.reference_tables import ReferenceBagCollection
from tests.embedding.test_exactness import random_batch

OPTIMIZER = SparseOptimizerSettings(name="adagrad", learning_rate=0.1)
KEYS = {"user": 60, "item": 45}
DEPTHS = [0, 1, 2, 5]
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Also the collection's own thread ends, with the collection."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name


def lanes() -> list[str]:
    """The pipelines' threads that are running."""
    return [thread.name for thread in threading.enumerate() if thread.name in ("plan ahead", "move ahead")]


def ends(work: Callable[[], Any]) -> None:
    """Runs ``work`` in a thread, so that the test fails where it hangs, and raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def batches(count: int, seed: int = 0, batch_size: int = 6) -> list[KeyedJaggedTensor]:
    random = np.random.default_rng(seed)
    return [random_batch(random, KEYS, batch_size, 2, 1.0, False) for _ in range(count)]


class Trained:
    """A collection, and the same tables resident, trained side by side."""

    def __init__(self, size: int | str = "40%", limit: int | None = None, keys: dict[str, int] = KEYS) -> None:
        configs = [EmbeddingBagConfig(rows, 4, f"{key}s", feature_names=[key]) for key, rows in keys.items()]
        self.collection = HostEmbeddingBagCollection(
            configs,
            optimizer=OPTIMIZER,
            threads=1,
            placements=dict.fromkeys([config.name for config in configs], "cached"),
            cache=CacheSettings(size=size, limit=limit),
        )
        self.resident = ReferenceBagCollection(self.collection, OPTIMIZER)
        self.random = np.random.default_rng(1)
        self.steps = 0

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        output = self.collection(batch).values()
        assert torch.equal(output, self.resident.forward(batch))
        return output

    def step(self, batch: KeyedJaggedTensor) -> None:
        output = self.forward(batch)
        gradient = torch.from_numpy(self.random.standard_normal(tuple(output.shape)).astype(np.float32))
        output.backward(gradient)
        self.resident.backward(batch, gradient, OPTIMIZER.learning_rate)
        self.steps += 1

    def train(self, loop: Iterable[KeyedJaggedTensor]) -> int:
        """Trains on the loop's batches; returns how many there were."""
        before = self.steps
        for batch in loop:
            self.step(batch)
        return self.steps - before

    def check(self) -> None:
        """The loop left no thread and no held slot behind, and the tables are right to the bit."""
        assert lanes() == []
        assert self.collection.cache is not None and self.collection.cache.unfinished == 0
        self.collection.flush()
        self.resident.assert_equal(self.collection)


@pytest.mark.parametrize("depth", range(9))
def test_several_epochs_at_any_depth_also_deeper_than_the_loader_is_long(depth: int) -> None:
    trained = Trained()
    loop = prefetch(batches(5), trained.collection, depth)
    for _ in range(3):
        assert trained.train(loop) == 5
        trained.check()
    assert loop.counts().batches == 15 and loop.queue_depths() == {"planned": 0, "ready": 0}


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_empty_loader_has_no_batches(depth: int) -> None:
    trained = Trained()
    source: list[KeyedJaggedTensor] = []
    loop = prefetch(source, trained.collection, depth)
    assert list(loop) == [] and len(loop) == 0
    source.extend(batches(2))
    assert trained.train(loop) == len(loop) == 2
    trained.check()


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth must be at least 0, not -1"):
        prefetch([], nn.Identity(), -1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loop_may_be_left_and_begun_anew(depth: int) -> None:
    trained = Trained()
    loop = prefetch(batches(8), trained.collection, depth)
    for left_at in (0, 3, 7):
        for index, batch in enumerate(loop):
            if index == left_at:
                break  # this batch holds slots, and no forward pass ever used them
            trained.step(batch)
        trained.check()
    assert trained.train(loop) == 8
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loop_begun_while_another_is_under_way_ends_that_one(depth: int) -> None:
    trained = Trained()
    loop = prefetch(batches(6), trained.collection, depth)
    first = iter(loop)
    trained.step(next(first))
    assert trained.train(loop) == 6
    assert list(first) == []
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("good", [0, 3])
def test_a_loaders_error_is_raised_after_the_batches_before_it(depth: int, good: int) -> None:
    class Breaking:
        broken = True

        def __iter__(self) -> Iterator[KeyedJaggedTensor]:
            for index, batch in enumerate(batches(6)):
                if self.broken and index == good:
                    raise OSError("the disk is gone")
                yield batch

    trained, loader = Trained(), Breaking()
    loop = prefetch(loader, trained.collection, depth)
    for _ in range(2):
        before = trained.steps
        with pytest.raises(OSError, match="the disk is gone") as caught:
            ends(lambda: trained.train(loop))
        assert trained.steps - before == good
        assert "raise OSError" in "".join(traceback.format_tb(caught.value.__traceback__))
        trained.check()
    loader.broken = False
    assert trained.train(loop) == 6
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_in_the_loop_ends_the_threads(depth: int) -> None:
    trained = Trained()
    loop = prefetch(batches(8), trained.collection, depth)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            for index, batch in enumerate(loop):
                trained.step(batch)
                if index == 2:
                    1 / 0  # noqa: B018
        trained.check()
    assert trained.train(loop) == 8
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_invalid_id_is_raised_by_the_forward_pass_of_its_batch(depth: int) -> None:
    bad = KeyedJaggedTensor(["user", "item"], torch.tensor([3, 45]), lengths=torch.tensor([1, 1]))
    trained = Trained()
    loop = prefetch([*batches(3), bad, *batches(3)], trained.collection, depth)
    with pytest.raises(InvalidIdError, match=r"items.*id 45"):
        ends(lambda: trained.train(loop))
    assert trained.steps == 3
    trained.check()


def wide_batch(rows: int) -> KeyedJaggedTensor:
    """One sample that uses ``rows`` users."""
    return KeyedJaggedTensor(["user", "item"], torch.arange(rows), lengths=torch.tensor([rows, 0]))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("good", [0, 4])
def test_a_batch_larger_than_the_limit_is_refused_with_the_slots_it_needs(depth: int, good: int) -> None:
    trained = Trained(size=20, limit=30)
    loop = prefetch([*batches(good), wide_batch(50), *batches(20)], trained.collection, depth)
    with pytest.raises(CacheTooSmallError, match=r"needs 50 slots for a batch of 50 rows.* may have only 30"):
        ends(lambda: trained.train(loop))
    assert trained.steps == good
    trained.check()
    assert trained.train(prefetch(batches(4), trained.collection, depth)) == 4
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_growth_warns_once(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    trained = Trained(size=4)
    with caplog.at_level(logging.WARNING):
        for rows in (20, 40, 60):
            assert trained.train(prefetch([wide_batch(rows)], trained.collection, depth)) == 1
    warnings = [record.message for record in caplog.records if "grows to" in record.message]
    assert len(warnings) == 1 and "had 4 slots" in warnings[0] and "a batch of 20 rows" in warnings[0]
    assert trained.collection.statistics.counts().grown == 3
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_same_tensor_may_come_several_times(depth: int) -> None:
    trained = Trained()
    first, second = batches(2)
    loop = prefetch([first, first, second, first, second, second], trained.collection, depth)
    assert trained.train(loop) == 6
    for index, batch in enumerate(loop):  # some are never looked up
        if index % 2:
            trained.step(batch)
    trained.check()


@dataclass
class Sample:
    """A batch as a class of the user's."""

    label: int
    ids: KeyedJaggedTensor


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda ids: (torch.zeros(1), ids), lambda batch: batch[1]),
        (lambda ids: {"label": 1, "ids": ids}, lambda batch: batch["ids"]),
        (lambda ids: Sample(1, ids), lambda batch: batch.ids),
        (lambda ids: [{"inner": (Sample(1, ids), None)}], lambda batch: batch[0]["inner"][0].ids),
    ],
    ids=["tuple", "dict", "dataclass", "nested"],
)
def test_ids_are_found_in_batches_of_any_kind(
    depth: int, wrap: Callable[[KeyedJaggedTensor], Any], unwrap: Callable[[Any], KeyedJaggedTensor]
) -> None:
    trained = Trained()
    loop = prefetch([wrap(ids) for ids in batches(4)], trained.collection, depth)
    assert trained.train(unwrap(batch) for batch in loop) == 4
    assert loop.counts().batches == 4  # planned ahead, and not a second time by the forward pass
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_without_ids_pass_through(depth: int) -> None:
    trained = Trained()
    others = [KeyedJaggedTensor(["other"], torch.tensor([1]), lengths=torch.tensor([1])), 5, "text", None]
    assert list(prefetch(others, trained.collection, depth)) == others
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_model_may_have_several_collections(depth: int) -> None:
    """Two read the same tensor, and one of them is not always in training; the third has a tensor of its own."""
    both, small, other = Trained(), Trained(size=10), Trained(keys={"shop": 30})
    model = nn.ModuleList([both.collection, nn.Sequential(small.collection), other.collection])
    random = np.random.default_rng(2)
    shops = [random_batch(random, {"shop": 30}, 5, 2, 0.0, False) for _ in range(6)]
    loop = prefetch(list(zip(batches(6), shops, strict=True)), model, depth)
    for epoch in range(3):
        small.collection.train(epoch != 1)
        for ids, shop in loop:
            both.step(ids)
            other.step(shop)
            if epoch != 1:
                small.step(ids)
    for trained in (both, small, other):
        trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_forwards_without_a_backward_hold_no_slots(depth: int) -> None:
    trained = Trained(size=30, limit=45)  # two batches would fit, not ten
    for index, batch in enumerate(prefetch(batches(10), trained.collection, depth)):
        if index % 3 == 0:
            trained.forward(batch)
        elif index % 3 == 1:
            trained.collection.eval()
            trained.forward(batch)
            trained.collection.train()
        else:
            trained.step(batch)
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_several_forwards_may_come_before_one_backward(depth: int) -> None:
    """All of them hold their slots, so a cache that is too small for that grows."""
    trained = Trained(size=8)
    gathered: list[tuple[KeyedJaggedTensor, Tensor]] = []
    for batch in prefetch(batches(9), trained.collection, depth):
        gathered.append((batch, trained.forward(batch)))
        if len(gathered) == 3:
            sum((output.sum() for _, output in gathered), torch.zeros(())).backward()
            for one, output in reversed(gathered):  # autograd goes backwards in the order opposite to the forwards'
                trained.resident.backward(one, torch.ones_like(output), OPTIMIZER.learning_rate)
            gathered = []
    assert trained.collection.statistics.counts().grown > 0
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_other_tensors_may_be_trained_on_in_between(depth: int) -> None:
    trained = Trained(size=10)
    others = iter(batches(6, seed=3))
    for batch in prefetch(batches(6), trained.collection, depth):
        trained.step(next(others))
        trained.step(batch)
        trained.step(batch)  # its plan has been used up
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loader_is_never_read_further_ahead_than_asked(depth: int) -> None:
    read, handed_out, too_far = 0, 0, []

    def loader() -> Iterator[KeyedJaggedTensor]:
        nonlocal read
        for batch in batches(20):
            read += 1
            if read > handed_out + depth + 1:  # the batch that the loop waits for is not ahead
                too_far.append((read, handed_out))
            yield batch

    trained = Trained()
    reached = threading.Event()
    for batch in prefetch(loader(), trained.collection, depth):
        handed_out += 1
        trained.step(batch)
        reached.wait(0.005)
        assert read <= handed_out + depth
    assert read == handed_out == 20 and not too_far
    trained.check()


class Positioned:
    """A loader that goes on behind the last batch that it handed out, as ``ParquetBatches`` does."""

    def __init__(self, source: list[KeyedJaggedTensor]) -> None:
        self.source, self.epoch, self.place = source, 0, 0

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while self.place < len(self.source):
            self.place += 1
            yield self.source[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_position_is_behind_the_last_batch_handed_out(depth: int) -> None:
    trained = Trained()
    source = batches(7)
    loader = Positioned(source)
    loop = prefetch(loader, trained.collection, depth)
    seen = []
    for place, batch in enumerate(loop, 1):
        seen.append(batch)
        assert loop.state_dict() == {"epoch": 0, "place": place}
        if place == 3:
            break
    assert loop.state_dict() == loader.state_dict() == {"epoch": 0, "place": 3}
    seen.extend(loop)
    assert all(one is other for one, other in zip(seen, source, strict=True))
    assert loop.state_dict() == {"epoch": 1, "place": 0}
    assert len(list(loop)) == 7
    trained.check()


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_sets_the_loader_back_behind_the_last_batch_handed_out(depth: int) -> None:
    trained = Trained(size=20, limit=30)
    for good in (0, 2):
        loader = Positioned([*batches(good), wide_batch(50), *batches(6)])
        loop = prefetch(loader, trained.collection, depth)
        with pytest.raises(CacheTooSmallError):
            ends(lambda loop=loop: trained.train(loop))
        assert loop.state_dict() == loader.state_dict() == {"epoch": 0, "place": good}
    trained.check()


def test_a_loader_without_positions_has_no_state() -> None:
    with pytest.raises(AttributeError):
        prefetch([], nn.Identity(), 1).state_dict()
