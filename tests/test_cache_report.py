"""What a run is told of its cache: since the last time, in total, and as a trace of some steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.cache_report import STEPS_BEFORE_TRACE, CacheReport
from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings, Placement
from recsys_offload.embedding.statistics import CacheCounts

SLOTS = 8


def collection(placement: Placement, name: str = "item") -> HostEmbeddingBagCollection:
    return HostEmbeddingBagCollection(
        [EmbeddingBagConfig(50, 4, f"{name}s", feature_names=[name])],
        optimizer=SparseOptimizerSettings(name="sgd", learning_rate=0.1),
        threads=1,
        placements={f"{name}s": placement},
        cache=CacheSettings(size=SLOTS),
    )


def batch(rows: Sequence[int]) -> KeyedJaggedTensor:
    """One sample that has the same rows under both keys."""
    values = torch.tensor([*rows, *rows])
    return KeyedJaggedTensor(["item", "user"], values, lengths=torch.tensor([len(rows), len(rows)]))


class Run:
    """Collections that are trained, one batch after the other, and the report on them."""

    def __init__(self, folder: Path, *collections: HostEmbeddingBagCollection, trace_steps: int | None = None) -> None:
        self.collections = collections
        self.batches: list[KeyedJaggedTensor] = []
        self.loop = prefetch(self.batches, nn.ModuleList(collections), 0)
        self.report = CacheReport(collections, self.loop, folder, trace_steps)

    def step(self, *rows: int) -> None:
        self.batches[:] = [batch(rows)]
        for features in self.loop:
            for one in self.collections:
                one(features).values().sum().backward()
        self.report.after_step()


def hits(text: str) -> str:
    """The hit rate in the text for the progress line."""
    words = text.split()
    assert words[::2] == ["hits", "stalled"] and words[3].endswith("s") and float(words[3][:-1]) >= 0
    return words[1]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_without_a_cache_there_is_nothing_to_tell(placement: Placement, tmp_path: Path) -> None:
    run = Run(tmp_path, collection(placement))
    run.step(1, 2)
    assert not run.report.has_cache
    assert (run.report.text(), run.report.values(), run.report.totals()) == ("", {}, None)
    empty = Run(tmp_path)
    assert not empty.report.has_cache and empty.report.totals() is None


def test_one_cached_table_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("host"), collection("cached", "user"))
    run.step(1, 2, 3)
    assert run.report.has_cache
    assert run.report.values()["cache_slots"] == SLOTS
    totals = run.report.totals()
    assert totals is not None and totals["rows"] == totals["fetched"] == 3


def test_the_progress_line_has_the_hit_rate_since_the_last_one(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"))
    run.step(1, 2, 3, 4)
    assert hits(run.report.text()) == "0.0%"
    run.step(1, 2, 3, 5)
    run.report.values()  # the logs have a last time of their own
    assert hits(run.report.text()) == "75.0%"
    run.step(1, 2, 3)
    run.step(1, 2, 6)
    assert hits(run.report.text()) == "83.3%"
    assert hits(run.report.text()) == "100.0%"


def test_the_logs_have_what_was_added_since_the_last_time(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"))
    run.step(1, 2, 3, 4)
    first = run.report.values()
    assert (first["cache_batches"], first["cache_rows"], first["cache_hits"], first["cache_fetched"]) == (1, 4, 0, 4)
    assert first["cache_fetched_bytes"] == 4 * 4 * 4 and first["cache_hit_rate"] == 0.0
    run.step(1, 2, 5)
    run.report.text()
    run.step(6, 7, 8)
    run.step(9, 10, 11)  # in place of three that have changed
    second = run.report.values()
    assert (second["cache_batches"], second["cache_rows"], second["cache_hits"]) == (3, 9, 2)
    assert second["cache_hit_rate"] == 2 / 9
    assert second["cache_written_back"] == 3 and second["cache_written_back_bytes"] == 3 * 4 * 4
    nothing = run.report.values()
    assert {nothing[f"cache_{name}"] for name in vars(CacheCounts())} == {0}
    assert nothing["cache_hit_rate"] == 1.0


def test_the_logs_say_how_full_slots_and_queues_are_now(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"), collection("cached", "user"))
    run.step(1, 2)
    values = run.report.values()
    assert (values["cache_slots"], values["cache_slots_held"]) == (2 * SLOTS, 0)
    output = run.collections[0](batch([1, 2, 3])).values()
    assert run.report.values()["cache_slots_held"] == 3
    output.sum().backward()
    values = run.report.values()
    assert (values["cache_slots_held"], values["queue_planned"], values["queue_ready"]) == (0, 0, 0)


def test_the_queues_are_those_of_the_loop_that_runs(tmp_path: Path) -> None:
    model = collection("cached")
    loop = prefetch([batch([row]) for row in range(6)], model, depth=4)
    report = CacheReport([model], loop, tmp_path, None)
    for place, features in enumerate(loop):
        model(features).values().sum().backward()
        values = report.values()
        assert 0 <= values["queue_planned"] + values["queue_ready"] <= min(4, 5 - place)
    assert report.values()["queue_planned"] == report.values()["queue_ready"] == 0


def test_the_summary_has_the_whole_run_of_all_collections(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"), collection("cached", "user"))
    run.step(1, 2, 3)
    run.report.text()
    run.report.values()
    run.step(1, 2, 4)
    totals = run.report.totals()
    assert totals is not None
    assert totals == run.loop.counts().values() == run.report.totals()
    assert (totals["batches"], totals["rows"], totals["hits"], totals["fetched"]) == (4, 12, 4, 8)
    assert totals["hit_rate"] == 4 / 12


def lookups(folder: Path) -> list[float]:
    """The times at which lookups began, out of a trace."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times) and times[0] == 0
    return [event["ts"] for event in events if event["name"] == "lookup"]


def test_some_steps_are_traced_after_the_first_ones(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"), collection("cached", "user"), trace_steps=3)
    for step in range(STEPS_BEFORE_TRACE + 3):
        assert not list(tmp_path.iterdir())
        assert [one.statistics.tracing for one in run.collections] == [step >= STEPS_BEFORE_TRACE] * 2
        run.step(step % 50)
    assert not any(one.statistics.tracing for one in run.collections)
    assert len(lookups(tmp_path)) == 2 * 3  # of both collections
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "timeline.json").read_bytes()
    run.step(1)
    run.report.write_trace()
    assert (tmp_path / "timeline.json").read_bytes() == before


def test_a_run_that_ends_earlier_writes_what_was_traced(tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"), trace_steps=100)
    for step in range(STEPS_BEFORE_TRACE + 2):
        run.step(step % 50)
    run.report.write_trace()
    assert len(lookups(tmp_path)) == 2
    assert not run.collections[0].statistics.tracing


@pytest.mark.parametrize("trace_steps", [None, 100])
def test_without_a_trace_nothing_is_written(trace_steps: int | None, tmp_path: Path) -> None:
    run = Run(tmp_path, collection("cached"), trace_steps=trace_steps)
    for step in range(STEPS_BEFORE_TRACE + 5 if trace_steps is None else STEPS_BEFORE_TRACE - 1):
        run.step(step % 50)
    run.report.write_trace()
    assert not list(tmp_path.iterdir())
    assert run.collections[0].statistics.spans() == []
