"""Runs with a cache are stopped and go on: to the bits of an uninterrupted run, and of one on the host's tables."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recsys_offload import evaluate, predict
from recsys_offload.config import load_config
from recsys_offload.data import Batch
from recsys_offload.embedding.slots import HostSlots
from recsys_offload.run_folder import RunFolder, RunFolderError
from recsys_offload.stop_request import StopRequested
from recsys_offload.trainer import Trainer
from tests.test_cached_training import (
    LOOK_AHEAD,
    MIXED,
    PATIENCE,
    STEPS,
    STEPS_PER_EPOCH,
    HostRuns,
    Options,
    Outcome,
    arguments,
    assert_same,
    assert_same_tensors,
    cached,
    checkpoint_tensors,
    collection_of,
    finish,
    no_thread_is_left,
    opened,
    quickly,
    train,
    write_base,
)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.fixture(scope="module", autouse=True)
def _quickly() -> Iterator[None]:
    with quickly():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def host(base: Path, tmp_path_factory: pytest.TempPathFactory) -> HostRuns:
    return HostRuns(base, tmp_path_factory.mktemp("host"))


def stop(base: Path, folder: Path, options: Options, step: int) -> Path:
    """Trains until a stop is asked for after ``step``; the checkpoint that was saved."""
    with opened(base, folder, options) as trainer:
        train_step = trainer._train_step

        def stop_after(batch: Batch) -> None:
            train_step(batch)
            trainer.stop.requested = trainer.state.step == step

        trainer._train_step = stop_after  # type: ignore[method-assign]
        with pytest.raises(StopRequested):
            trainer.train()
        assert trainer.state.step == step
    return checkpoint(folder, step)


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09d}"


@contextmanager
def moved(base: Path, old: Path, new: Path, options: Options) -> Iterator[Trainer]:
    """A run with other options that begins with what another run has left behind."""
    with RunFolder(load_config(arguments(base, new, options))):
        for name in ("checkpoints", "encoding"):
            shutil.copytree(old / name, new / name)
        shutil.copy(old / "metrics.jsonl", new)
    with opened(base, new, options) as trainer:
        yield trainer


def assert_went_on(found: Outcome, expected: Outcome, step: int) -> None:
    assert_same(found, expected)
    assert found.batches == expected.batches[step:]


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("stops", "options"),
    [
        ([5, 14, 36], cached("rowwise_adagrad", 8, warm_start=True)),
        ([22], cached("adam", 0, kernels="torch")),  # where a checkpoint is saved anyway
        ([STEPS_PER_EPOCH], cached("rowwise_adagrad", 1, "30%")),  # at the end of the epoch, before its evaluation
        ([STEPS_PER_EPOCH - 1, STEPS - 1], cached("adam", 8, placements=MIXED)),
        ([13], cached("rowwise_adagrad", LOOK_AHEAD, 5)),  # it has grown before, and grows again
        ([13], cached("adam", LOOK_AHEAD, placement="device")),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    base: Path, host: HostRuns, tmp_path: Path, stops: list[int], options: Options
) -> None:
    for step in stops:
        stop(base, tmp_path / "run", options, step)
    found = train(base, tmp_path / "run", options)
    assert_went_on(found, host(options), stops[-1])


def test_a_stopped_run_equals_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    options = cached("adam", LOOK_AHEAD)
    stop(base, tmp_path / "parts", options, 17)
    assert_went_on(train(base, tmp_path / "parts", options), train(base, tmp_path / "whole", options), 17)


def test_more_steps_later_equal_as_many_at_once(base: Path, host: HostRuns, tmp_path: Path) -> None:
    """The shorter run is over in the middle of an epoch, with batches planned that it never trains on."""
    options = cached("adam", LOOK_AHEAD)
    train(base, tmp_path / "run", {**options, "train.steps": 22, "train.evaluation_interval_steps": 100})
    found = train(base, tmp_path / "run", options)
    expected = host(options)
    last = f"step-{STEPS:09d}"
    assert_same_tensors(found.tensors[last], expected.tensors[last])
    assert found.batches == expected.batches[22:]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (cached("adam", LOOK_AHEAD), cached("adam", 0, placement="host")),
        (cached("adam", 0, placement="host"), cached("adam", 8)),
        (cached("adam", 0, placement="device"), cached("adam", 1, 120, warm_start=True)),
        (cached("rowwise_adagrad", 8, "30%", warm_start=True), cached("rowwise_adagrad", 0, placements=MIXED)),
        (cached("rowwise_adagrad", 1, sizes={"user": 50}, kernels="torch"), cached("rowwise_adagrad", 8, 5)),
    ],
    ids=str,
)
def test_another_cache_goes_on_to_the_same_bits(
    base: Path, host: HostRuns, tmp_path: Path, first: Options, then: Options
) -> None:
    step = 14
    stop(base, tmp_path / "first", first, step)
    with moved(base, tmp_path / "first", tmp_path / "then", then) as trainer:
        assert trainer.state.step == step
        assert_went_on(finish(trainer), host(then), step)


def test_a_run_whose_cache_may_not_grow_goes_on_with_a_higher_limit(base: Path, host: HostRuns, tmp_path: Path) -> None:
    """From the checkpoint before the batch that was too large, as the error advises."""
    options = cached("adam", LOOK_AHEAD, 5)
    expected = host(options)
    sizes = list(map(len, expected.batches))
    with opened(base, tmp_path / "first", {**options, "embedding.cache.limit": max(sizes) - 1}) as trainer:
        with pytest.raises(MemoryError, match=r"raise embedding\.cache\.limit"):
            trainer.train()
        assert trainer.state.step == sizes.index(max(sizes)) > 11
    more = {**options, "embedding.cache.limit": max(sizes)}
    with moved(base, tmp_path / "first", tmp_path / "more", more) as trainer:
        assert trainer.state.step == 11
        assert_went_on(finish(trainer), expected, 11)


def test_the_run_folder_takes_other_settings_of_the_cache(base: Path, tmp_path: Path) -> None:
    """They do not change the numbers, as the number of threads does not."""
    options = cached("adam", LOOK_AHEAD, placements={"tags": "device"}, sizes={"user": 50}, limit="50%")
    RunFolder(load_config(arguments(base, tmp_path / "run", options))).close()
    refused = []
    changes: list[dict[str, Any]] = [
        {"look_ahead": 8},
        {"placement": "host", "embedding.cache.sizes": {}},
        {"placements": {"tags": "cached"}},
        {"placements": {}},
        {"device_memory": "1MB"},
        {"embedding.cache.size": "20%"},
        {"embedding.cache.sizes": {"user": 70}},
        {"embedding.cache.limit": "60%"},
        {"embedding.cache.limit": None},
        {"embedding.cache.warm_start": True},
    ]
    for change in changes:
        try:
            RunFolder(load_config(arguments(base, tmp_path / "run", {**options, **change}))).close()
        except RunFolderError:
            refused.append(change)
        RunFolder(load_config(arguments(base, tmp_path / "run", options))).close()
    assert refused == []


def test_the_run_folder_refuses_kernels_that_change_the_numbers(base: Path, tmp_path: Path) -> None:
    options = cached("rowwise_adagrad", LOOK_AHEAD)
    RunFolder(load_config(arguments(base, tmp_path / "run", options))).close()
    fbgemm = {**options, "embedding.cache.kernels": "fbgemm"}
    with pytest.raises(RunFolderError, match=r"embedding\.cache\.kernels: 'auto' there, 'fbgemm' now"):
        RunFolder(load_config(arguments(base, tmp_path / "run", fbgemm)))


def test_a_warm_start_is_warm_when_a_run_goes_on(base: Path, host: HostRuns, tmp_path: Path) -> None:
    options = cached("adam", LOOK_AHEAD, "100%", warm_start=True)
    stop(base, tmp_path / "run", options, 13)
    found = train(base, tmp_path / "run", options)
    assert_went_on(found, host(options), 13)
    assert found.cache["fetched"] == 0, "every row had a slot at the start"


# ---------------------------------------------------------------------------------------------------- in flight


@pytest.mark.parametrize(
    "options",
    [
        cached("adam", 8, "30%"),
        cached("adam", 1, warm_start=True, placements=MIXED),
    ],
    ids=str,
)
def test_checkpoints_hold_the_newest_rows_while_batches_are_in_flight(
    base: Path, host: HostRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    """Rows move slowly, and each checkpoint is saved when the pipeline is full."""
    for name in ("fetch", "write_back"):
        slow(monkeypatch, name)
    often = {"checkpoint.interval_steps": 3}
    expected = host({**options, **often})
    ahead, unfinished = [], []
    with opened(base, tmp_path / "run", {**options, **often}) as trainer:
        save = trainer._save

        def save_when_full() -> None:
            step = trainer.state.step
            between_epochs = step in (STEPS_PER_EPOCH, STEPS)
            batches = 0 if between_epochs else min(options["look_ahead"], -step % STEPS_PER_EPOCH)
            deadline = time.monotonic() + PATIENCE
            while sum(trainer.prefetched.queue_depths().values()) < batches:
                assert time.monotonic() < deadline, trainer.prefetched.queue_depths()
                time.sleep(0.0005)
            ahead.append(batches)
            cache = collection_of(trainer).cache
            assert cache is not None
            unfinished.append(cache.unfinished)
            save()

        trainer._save = save_when_full  # type: ignore[method-assign]
        found = finish(trainer)
        assert found.cache["written_back"] > 0
    assert len(expected.tensors) >= STEPS / 3
    assert ahead.count(options["look_ahead"]) >= STEPS / 4, "the pipeline was full"
    if options["embedding.cache.size"] == "30%":
        assert max(unfinished) > 0, "the next batch's rows have slots already"
    assert_same(found, expected)


def slow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each move takes a while longer."""
    move = getattr(HostSlots, name)

    def slowly(*arguments: Any) -> None:
        time.sleep(0.001)
        move(*arguments)

    monkeypatch.setattr(HostSlots, name, slowly)


def test_the_checkpoint_of_a_stop_holds_the_newest_rows(base: Path, tmp_path: Path) -> None:
    options = cached("adam", 8, "30%")
    stopped = stop(base, tmp_path / "cached", options, 19)
    on_host = stop(base, tmp_path / "host", cached("adam", 0, placement="host"), 19)
    assert_same_tensors(checkpoint_tensors(stopped), checkpoint_tensors(on_host))


# ---------------------------------------------------------------------------------------------------- scores


def test_a_checkpoint_gives_the_hosts_scores(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = cached("adam", 8, sizes={"user": 60}, warm_start=True)
    expected = train(base, tmp_path / "host", cached("adam", 0, placement="host"))
    found = train(base, tmp_path / "cached", options)
    assert found.summary.best_step == expected.summary.best_step
    clicks = str(base.parent / "clicks.parquet")
    seen = set()
    for step in (11, STEPS_PER_EPOCH, STEPS):
        scores, metrics = [], []
        for folder in (tmp_path / "host", tmp_path / "cached"):
            path = checkpoint(folder, step)
            output = folder / f"{step}.parquet"
            assert predict.main([str(path), "--data", clicks, "--out", str(output)]) == 0
            scores.append(pq.read_table(output))
            capsys.readouterr()
            assert evaluate.main([str(path)]) == 0
            metrics.append(json.loads(capsys.readouterr().out))
        assert scores[0].equals(scores[1])
        assert metrics[0] | {"checkpoint": ""} == metrics[1] | {"checkpoint": ""}
        seen.add(metrics[1]["auc"])
        if step == found.summary.best_step:
            assert found.summary.test is not None
            assert {name: metrics[1][name] for name in found.summary.test} == found.summary.test
    assert len(seen) == 3
