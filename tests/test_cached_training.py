"""The trainer with a cache: whatever the cache is like, a run has the bits of one on the host's tables."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from recsys_offload.config import load_config
from recsys_offload.data import Batch
from recsys_offload.embedding import HostCollection, host_collections
from recsys_offload.embedding.cache import CacheTooSmallError, DeviceCache
from recsys_offload.run_folder import RunFolder
from recsys_offload.safetensors_stream import read_safetensors
from recsys_offload.summary import Summary
from recsys_offload.train import main
from recsys_offload.trainer import Trainer
from tests.small_run import ROWS, write_data, write_settings

TABLES = {"user": 1000, "item": 200, "tags": 60}
STEPS_PER_EPOCH = 31
STEPS = 40
LOOK_AHEAD = 4
# float32 values of one row with its state, 8 of them weights.
ROW_VALUES = {"sgd": 8, "rowwise_adagrad": 9, "adagrad": 16, "adam": 24}
PATIENCE = 10.0

Options = Mapping[str, Any]
"""Settings by their dotted names; those of the embedding without ``embedding.``."""


def write_base(folder: Path) -> Path:
    """Data with tables so large that a batch uses a small part of them, and settings to train on it; their path.

    Users are skewed, so that a cache of them has hits; items and tags are not.
    """
    generator = np.random.default_rng(7)
    user = (TABLES["user"] * generator.random(ROWS) ** 4).astype(np.int64)
    tags = [generator.integers(0, TABLES["tags"], generator.integers(0, 4)).tolist() for _ in range(ROWS)]
    write_data(folder / "clicks.parquet", user=user, item=generator.integers(0, TABLES["item"], ROWS), tags=tags)
    return write_settings(
        folder,
        data={"sparse": {name: {"num_embeddings": rows} for name, rows in TABLES.items()}},
        train={"batch_size": 32, "epochs": None, "steps": STEPS},
        schedules={
            "dense": {"name": "cosine", "warmup_steps": 3, "decay_steps": 50},
            "sparse": {"name": "step", "milestones": [20], "step_factor": 0.5},
        },
        checkpoint={"interval_steps": 11, "keep": 100},
    )


@dataclass(frozen=True)
class Outcome:
    """All that a run came to.

    Attributes:
        summary: of the run.
        records: of metrics.jsonl.
        weights: the model's state dict at the end, when it is the best one.
        tensors: of each checkpoint: file and name -> tensor.
        notes: of each checkpoint, what its JSON files hold.
        batches: of each step, table and row of all that its batch used.
        placements: of each table.
    """

    summary: Summary
    records: list[dict[str, Any]]
    weights: dict[str, Tensor]
    tensors: dict[str, dict[str, Tensor]]
    notes: dict[str, dict[str, Any]]
    batches: list[set[tuple[str, int]]]
    placements: dict[str, str]

    @property
    def cache(self) -> Mapping[str, float]:
        assert self.summary.cache is not None
        return self.summary.cache

    @property
    def largest_batch(self) -> int:
        return max(map(len, self.batches))


def arguments(base: Path, folder: Path, options: Options) -> list[str]:
    """Of the command line."""
    named = {name if "." in name else f"embedding.{name}": value for name, value in options.items()}
    return [str(base), f"--run.folder={folder}", *(f"--{name}={json.dumps(value)}" for name, value in named.items())]


@contextmanager
def opened(base: Path, folder: Path, options: Options) -> Iterator[Trainer]:
    with RunFolder(load_config(arguments(base, folder, options))) as run:
        yield Trainer(run, Console(file=io.StringIO()))


def collection_of(trainer: Trainer) -> HostCollection:
    [collection] = host_collections(trainer.model).values()
    return collection


def train(base: Path, folder: Path, options: Options) -> Outcome:
    with opened(base, folder, options) as trainer:
        return finish(trainer)


def finish(trainer: Trainer) -> Outcome:
    """Trains to the end."""
    batches = []
    train_step = trainer._train_step

    def noting(batch: Batch) -> None:
        batches.append({(name, row) for name in TABLES for row in batch.sparse[name].values().tolist()})
        train_step(batch)

    trainer._train_step = noting  # type: ignore[method-assign]
    summary = trainer.train()
    checkpoints = sorted(trainer.run.checkpoints.iterdir())
    return Outcome(
        summary,
        trainer.run.records(),
        {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        {path.name: checkpoint_tensors(path) for path in checkpoints},
        {
            path.name: {file.name: json.loads(file.read_text()) for file in path.glob("*state.json")}
            for path in checkpoints
        },
        batches,
        {name: group.placement for group in collection_of(trainer).tables.groups for name in group.tables},
    )


def checkpoint_tensors(path: Path) -> dict[str, Tensor]:
    return {
        f"{file.name}: {name}": tensor
        for file in sorted(path.rglob("*.safetensors"))
        for name, tensor in read_safetensors(file).items()
    }


def without_times(content: Any) -> Any:
    """What is left without times, and without what the cache of one process did: that is not what was trained."""
    if isinstance(content, Mapping):
        kept = [name for name in content if "second" not in name and not name.startswith(("cache", "queue_"))]
        return {name: without_times(content[name]) for name in kept}
    return [without_times(item) for item in content] if isinstance(content, list | tuple) else content


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str = "") -> None:
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (where, name)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """The same bits: in the logs, in all checkpoints that ``expected`` has, and in the model at the end."""
    assert without_times(found.records) == without_times(expected.records)
    assert without_times(asdict(found.summary)) == without_times(asdict(expected.summary))
    assert_same_tensors(found.weights, expected.weights, "at the end")
    assert expected.tensors
    for name, tensors in expected.tensors.items():
        assert_same_tensors(found.tensors[name], tensors, name)
        assert without_times(found.notes[name]) == without_times(expected.notes[name]), name


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Also the cache's own threads end, with the cache."""
    before = set(threading.enumerate())
    torch_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(torch_threads)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name


@contextmanager
def quickly() -> Iterator[None]:
    """Nothing waits for the disk, and the garbage collector does not look through all that was imported."""
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
    gc.unfreeze()


class HostRuns:
    """Runs on the host's tables, each made once: what the runs with a cache are compared with."""

    def __init__(self, base: Path, folder: Path) -> None:
        self._base, self._folder = base, folder
        self._made: dict[str, Outcome] = {}

    def __call__(self, options: Options) -> Outcome:
        """The run with ``options``, as far as they are not about where the tables are."""
        own = ("placement", "placements", "device_memory", "look_ahead")
        kept = {
            name: value for name, value in options.items() if name not in own and not name.startswith("embedding.cache")
        }
        key = json.dumps(kept, sort_keys=True)
        if key not in self._made:
            folder = self._folder / str(len(self._made))
            self._made[key] = train(self._base, folder, {**kept, "placement": "host"})
            assert self._made[key].summary.cache is None
        return self._made[key]


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


# ---------------------------------------------------------------------------------------------------- the same bits

MIXED = {"user": "cached", "item": "device", "tags": "host"}
ONE_BATCH = "one batch"
PLACEMENTS = ("placement", "placements", "device_memory")


def cached(optimizer: str, look_ahead: int, size: Any = "10%", **options: Any) -> dict[str, Any]:
    """Options of a run with a cache; those of ``embedding.cache`` by their own names."""
    own = {name: value for name, value in options.items() if name in PLACEMENTS}
    of_cache = {name: value for name, value in options.items() if name not in PLACEMENTS}
    return {
        "embedding.optimizer.name": optimizer,
        "look_ahead": look_ahead,
        **{f"embedding.cache.{name}": value for name, value in {"size": size, **of_cache}.items()},
        **own,
    }


def with_size(options: Options, rows: int) -> dict[str, Any]:
    """``options`` with the number in the place of ``ONE_BATCH``."""
    return {name: rows if value == ONE_BATCH else value for name, value in options.items()}


@pytest.mark.parametrize(
    "options",
    [
        cached("rowwise_adagrad", 4, ONE_BATCH),
        cached("adam", 1, ONE_BATCH, warm_start=True),
        cached("adagrad", 0, ONE_BATCH),
        cached("sgd", 8, ONE_BATCH, kernels="torch"),
        cached("rowwise_adagrad", 8, warm_start=True),
        cached("sgd", 1, kernels="torch", transfer="staging", warm_start=True),
        cached("adam", 8, "30%", kernels="torch", transfer="staging"),
        cached("rowwise_adagrad", 0, "100%", warm_start=True),
        cached("sgd", 8, "100%"),
        cached("adam", 0, sizes={"user": 60, "item": "20%"}, size="70%"),
        cached("adagrad", 8, "9KiB", sizes={"tags": "4KiB"}, warm_start=True),
    ],
    ids=str,
)
def test_cached_tables_are_trained_to_the_bits_of_the_hosts(
    base: Path, host: HostRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: Options
) -> None:
    expected = host(options)
    options = with_size(options, expected.largest_batch)
    found = train(base, tmp_path / "run", options)
    assert_same(found, expected)
    assert found.batches == expected.batches
    assert found.placements == dict.fromkeys(TABLES, "cached")
    assert found.cache["grown"] == 0 and "grows to" not in caplog.text
    used = len(set.union(*expected.batches))
    if options["embedding.cache.size"] == "100%":
        assert found.cache["fetched"] == (0 if options.get("embedding.cache.warm_start") else used)
    else:
        assert 0 < found.cache["hits"] < found.cache["rows"]
        assert found.cache["written_back"] > used / 2, "rows were evicted"


@pytest.mark.parametrize(
    ("options", "placements"),
    [
        (cached("adam", 1, kernels="torch", transfer="staging", placement="device"), dict.fromkeys(TABLES, "device")),
        (cached("adagrad", 8, placements=MIXED), MIXED),
        (
            cached("sgd", 4, placement="device", placements={"item": "cached"}, size=ONE_BATCH, warm_start=True),
            {"user": "device", "item": "cached", "tags": "device"},
        ),
        (
            cached("rowwise_adagrad", 1, placement="host", placements={"user": "cached"}, sizes={"user": 50}),
            {"user": "cached", "item": "host", "tags": "host"},
        ),
        # The smallest table has room as a whole; a third of the users make up most of their uses, not so of the items.
        (
            cached("adam", 4, placement="auto", device_memory="40KB", warm_start=True),
            {"user": "cached", "item": "host", "tags": "device"},
        ),
        (
            cached("rowwise_adagrad", 8, placement="auto", device_memory="20KB"),
            {"user": "cached", "item": "device", "tags": "device"},
        ),
        ({"look_ahead": 4, "placement": "auto"}, dict.fromkeys(TABLES, "host")),
    ],
    ids=str,
)
def test_tables_in_other_places_are_trained_to_the_same_bits(
    base: Path, host: HostRuns, tmp_path: Path, options: Options, placements: Mapping[str, str]
) -> None:
    expected = host(options)
    found = train(base, tmp_path / "run", with_size(options, expected.largest_batch))
    assert found.placements == placements
    assert_same(found, expected)
    assert (found.summary.cache is not None) == ("cached" in placements.values())
    if found.summary.cache is not None:
        in_cache = [name for name in placements if placements[name] == "cached"]
        trained = sum(table in in_cache for batch in expected.batches for table, _ in batch)
        ahead = found.cache["batches"] - STEPS  # admitted, but not trained on, when the run was over
        assert 0 <= ahead <= options["look_ahead"]
        assert trained <= found.cache["rows"] <= trained + ahead * expected.largest_batch


def test_fbgemm_trains_the_cache_to_the_bits_of_its_resident_tables_and_close_to_ours(
    base: Path, host: HostRuns, tmp_path: Path
) -> None:
    short = {"train.steps": 20, "train.evaluation_interval_steps": 9}
    options = {**cached("rowwise_adagrad", 4, kernels="fbgemm"), **short}
    found = train(base, tmp_path / "cached", options)
    assert found.cache["written_back"] > 0
    assert_same(found, train(base, tmp_path / "device", {**options, "placement": "device"}))
    ours = host(options)
    assert len(found.records) == len(ours.records) > 6
    for one, other in zip(without_times(found.records), without_times(ours.records), strict=True):
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=1e-3)
    for name, tensor in ours.weights.items():  # the same mathematics, in another order
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_evaluations_in_the_middle_change_nothing(base: Path, host: HostRuns, tmp_path: Path) -> None:
    """Not even with batches that have more rows than there are slots."""
    between = {"train.evaluation_interval_steps": 7, "train.evaluation_batch_size": 200}
    options = cached("adam", LOOK_AHEAD)
    plain, expected = host(options), host({**options, **between})
    found = train(base, tmp_path / "run", {**options, **between})
    assert_same(found, expected)
    evaluations = [record for record in found.records if record["kind"] == "validation"]
    assert [record["step"] for record in evaluations] == [7, 14, 21, 28, 35, STEPS] and found.cache["grown"] == 0
    losses = [[record for record in run.records if record["kind"] == "train"] for run in (found, plain)]
    assert without_times(losses[0]) == without_times(losses[1])
    last = f"step-{STEPS:09d}"
    assert_same_tensors(found.tensors[last], plain.tensors[last])


# ---------------------------------------------------------------------------------------------------- too small


@pytest.mark.parametrize(
    "options",
    [
        cached("adam", 0, 5, warm_start=True),
        cached("rowwise_adagrad", 8, 5, kernels="torch"),
        cached("rowwise_adagrad", LOOK_AHEAD, 5, sizes={"user": 3, "item": "1%"}),
    ],
    ids=str,
)
def test_a_cache_that_is_too_small_grows_with_one_warning(
    base: Path, host: HostRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: Options
) -> None:
    expected = host(options)
    with caplog.at_level(logging.WARNING):
        found = train(base, tmp_path / "run", options)
    assert_same(found, expected)
    warnings = [record.getMessage() for record in caplog.records if "grows to" in record.getMessage()]
    assert len(warnings) == 1
    numbers = re.search(r"had (\d+) slots and grows to (\d+): it needs (\d+) for a batch of (\d+) rows", warnings[0])
    assert numbers is not None and "embedding.cache.size" in warnings[0]
    had, grows_to, needs, rows = map(int, numbers.groups())
    assert had in (2, 3, 5) and had < rows <= needs <= grows_to
    assert found.cache["grown"] > 0
    slots = [record["cache_slots"] for record in found.records if record["kind"] == "train"]
    assert slots == sorted(slots) and expected.largest_batch <= slots[-1] < sum(TABLES.values())


@pytest.mark.parametrize("look_ahead", [0, LOOK_AHEAD])
def test_a_batch_beyond_the_limit_is_an_error_that_names_the_slots_it_needs(
    base: Path, host: HostRuns, tmp_path: Path, look_ahead: int
) -> None:
    expected = host(cached("adam", look_ahead))
    largest = expected.largest_batch
    step = list(map(len, expected.batches)).index(largest)
    options = cached("adam", look_ahead, 5, limit=largest - 1)
    with opened(base, tmp_path / "run", options) as trainer:
        with pytest.raises(CacheTooSmallError) as raised:
            trainer.train()
        assert trainer.state.step == step > 10, "the batches before it have been trained on"
        assert trainer.prefetched.queue_depths() == {"planned": 0, "ready": 0}
        cache = collection_of(trainer).cache
        assert cache is not None and cache.unfinished == 0
    text = str(raised.value)
    assert f"needs {largest} slots for a batch of {largest} rows" in text
    assert f"may have only {largest - 1}" in text and "raise embedding.cache.limit" in text
    assert_same(train(base, tmp_path / "more", {**options, "embedding.cache.limit": largest}), expected)


def test_a_process_whose_cache_may_not_grow_ends_with_a_message(base: Path, tmp_path: Path) -> None:
    program = (
        "import gc, sys, threading\n"
        "from recsys_offload.train import main\n"
        "status = main(sys.argv[1:])\n"
        "gc.collect()\n"
        "others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]\n"
        f"for thread in others: thread.join({PATIENCE})\n"
        "print('left:', [thread.name for thread in others if thread.is_alive()])\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments(base, tmp_path / "run", cached("adam", LOOK_AHEAD, 5, limit=20))],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "300"},
    )
    assert done.returncode == 2, done.stderr
    assert re.search(r"^error: the cache of 3 tables .* needs \d+ slots for a batch of", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert "left: []" in done.stdout


def test_a_limit_below_the_size_is_refused_before_training(base: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"cache\.limit 50 is less than the cache's size 10%"),
        opened(base, tmp_path / "run", cached("adam", LOOK_AHEAD, limit=50)),
    ):
        pass


def test_auto_stays_within_the_memory_it_is_given(base: Path, tmp_path: Path) -> None:
    options = cached("adam", LOOK_AHEAD, "100%", placement="auto", device_memory="40KB")
    slots = slots_of_tables(base, tmp_path / "run", options)
    assert slots["tags"] == TABLES["tags"] and "item" not in slots
    assert sum(slots.values()) * ROW_VALUES["adam"] * 4 <= 40_000, slots


def slots_of_tables(base: Path, folder: Path, options: Options) -> dict[str, int]:
    """The slots of every group of tables that has some, by the group's first table."""
    with opened(base, folder, options) as trainer:
        cache = collection_of(trainer).cache
        assert cache is not None
        return {next(iter(group.group.tables)): group.slots.count for group in cache.groups}


# ---------------------------------------------------------------------------------------------------- figures

COUNTS = ("batches", "rows", "hits", "fetched", "fetched_bytes", "written_back", "written_back_bytes", "grown")


def check_figures(figures: Mapping[str, float], row_bytes: int) -> None:
    for name in COUNTS:
        assert isinstance(figures[name], int) and figures[name] >= 0, name
    for name in ("stalled_seconds", "waiting_seconds", "moving_seconds", "hidden_seconds"):
        assert figures[name] >= 0, name
    assert 0 <= figures["hit_rate"] <= 1
    assert figures["rows"] == figures["hits"] + figures["fetched"]
    assert figures["hit_rate"] == (figures["hits"] / figures["rows"] if figures["rows"] else 1)
    assert figures["fetched_bytes"] == figures["fetched"] * row_bytes
    assert figures["written_back_bytes"] == figures["written_back"] * row_bytes


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_logs_and_summary_have_the_caches_figures(
    base: Path,
    host: HostRuns,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
) -> None:
    flush, flushes = DeviceCache.flush, []

    def counted(cache: DeviceCache) -> None:
        flushes.append(cache)
        flush(cache)

    monkeypatch.setattr(DeviceCache, "flush", counted)
    row_bytes = 4 * ROW_VALUES[optimizer]
    # One epoch: no batch is planned that is not trained on.
    options = {**cached(optimizer, LOOK_AHEAD), "train.steps": STEPS_PER_EPOCH, "logging.interval_steps": 1}
    expected = host(options)
    folder = tmp_path / "run"
    assert main(arguments(base, folder, options)) == 0
    total = json.loads((folder / "summary.json").read_text())["cache"]
    check_figures(total, row_bytes)
    assert total["batches"] == STEPS_PER_EPOCH and total["grown"] == 0
    assert total["rows"] == sum(map(len, expected.batches))
    used = len(set.union(*expected.batches))
    assert used <= total["fetched"] < total["rows"]
    assert used <= total["written_back"] <= total["fetched"] + len(flushes) * 126, "each flush: at most all"

    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if record["kind"] == "train"]
    assert len(logged) == STEPS_PER_EPOCH
    for record in logged:
        check_figures({name.removeprefix("cache_"): value for name, value in record.items()}, row_bytes)
        assert record["cache_slots"] == 126  # a tenth of the rows
        assert 0 <= record["cache_slots_held"] <= 126
        assert min(record["queue_planned"], record["queue_ready"]) >= 0
        assert record["queue_planned"] + record["queue_ready"] <= LOOK_AHEAD
    for name in ("batches", "rows", "hits", "fetched", "fetched_bytes"):
        assert sum(record[f"cache_{name}"] for record in logged) == total[name], name
    assert 0 < sum(record["cache_written_back"] for record in logged) <= total["written_back"]
    for record in records:
        if record["kind"] != "train":
            assert not [name for name in record if name.startswith(("cache_", "queue_"))]
    output = capsys.readouterr().out
    assert f"Embedding cache: {total['hit_rate']:.1%} hits" in output and "hits " in output
    assert not list(folder.glob("timeline*")), "nobody asked for a trace"


def test_without_a_cache_there_are_no_figures(base: Path, host: HostRuns, tmp_path: Path) -> None:
    runs = [host({}), train(base, tmp_path / "run", {"placement": "device", "train.steps": 10})]
    for run in runs:
        assert run.summary.cache is None
        assert not [name for record in run.records for name in record if name.startswith(("cache_", "queue_"))]


@pytest.mark.parametrize("trace_steps", [10, 1000])
def test_a_trace_is_written_and_changes_nothing(base: Path, host: HostRuns, tmp_path: Path, trace_steps: int) -> None:
    options = cached("adam", LOOK_AHEAD)
    folder = tmp_path / "run"
    assert_same(train(base, folder, {**options, "logging.trace_steps": trace_steps}), host(options))
    trace = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert set(lanes.values()) == {"training", "plan ahead", "move ahead", "move rows"}
    spans = [event for event in trace if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names: dict[str, list[str]] = {lane: [] for lane in lanes.values()}
    for event in spans:
        names[lanes[event["tid"]]].append(event["name"])
    assert names["training"].count("update") == min(trace_steps, STEPS - 20)  # it begins after 20 steps
    assert "plan" in names["plan ahead"] and {"fetch", "write back"} <= set(names["move rows"])
    assert all(re.fullmatch(r"admit batch \d+", name) for name in names["move ahead"])
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n")
