"""The GPU's benchmark, as far as a machine without one can tell: it runs, and it notices what is not exact."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import exactness
from benchmarks.gpu.click_batches import ClickBatches
from benchmarks.gpu.compare import Tables, copy_tables, differences
from benchmarks.gpu.exactness_training import make_batches, make_collection, table_specs, train
from benchmarks.gpu.fbgemm_caching import ManagedCaching
from benchmarks.gpu.options import PARTS, Options, parse_options
from benchmarks.gpu.program import run
from recsys_offload.embedding.config import CacheSettings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# One that is slow only because others use the machine, or because kernels have yet to be compiled, has not failed.
PATIENCE_SECONDS = 300
CPU = torch.device("cpu")


def results_now() -> dict[str, str]:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_rehearsal_runs_every_part_and_writes_no_results(tmp_path: Path) -> None:
    before = results_now()
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--copy-to", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert results_now() == before
    assert finished.stdout.count("no number in it means anything") == 2
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["rehearsal"] is True
    assert list(report["parts"]) == list(PARTS)
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(PARTS, "measured")
    checks = report["parts"]["exactness"]["checks"]
    assert {check["outcome"] for check in checks} == {"passed"}
    assert {check["optimizer"] for check in checks} == {"sgd", "adagrad", "rowwise_adagrad", "adam"}
    assert {check["pooling"] for check in checks} == {"sum", "mean", "unpooled"}
    lanes = {(check["kernels"], check["transfer"], check["depth"]) for check in checks}
    assert lanes == {(*lane, depth) for lane in exactness.LANES for depth in exactness.DEPTHS}
    contenders = report["parts"]["step"]["contenders"]
    assert contenders["cache of 10%"]["examples_per_second"] > 0
    assert contenders["FBGEMM, managed caching, 10%"]["status"] == "unmeasured"
    assert report["parts"]["overlap"]["lanes"]["zero_copy, look-ahead 4"]["status"] == "unmeasured"
    found = {one["expected"]: one["found"] for one in report["findings"]}
    assert [one["met"] for one in report["findings"]].count(None) == len(found) - 1  # a rehearsal measures nothing


def test_what_the_time_does_not_allow_is_unmeasured(tmp_path: Path) -> None:
    assert run(parse_options(["--rehearse", "--budget-seconds", "0", "--copy-to", str(tmp_path)])) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"unmeasured"}
    assert all("--budget-seconds" in part["why"] for part in parts.values())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = results_now()
    assert run(parse_options([])) == 2
    printed = capsys.readouterr().out
    assert "needs a GPU" in printed and "--rehearse" in printed
    assert results_now() == before


@pytest.fixture
def trained() -> dict[str, dict[str, torch.Tensor]]:
    specs = table_specs("bags", [4])
    cache = CacheSettings(size="50%", kernels="torch", transfer="staging")
    collection = make_collection("bags", specs, 20, "adagrad", "cached", cache, CPU)
    train(collection, make_batches(20, 4, 3), depth=2)
    return {table: dict(values) for table, values in copy_tables(collection).items()}


@pytest.mark.parametrize("values", ["weight", "sum"])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_changed_bit_is_a_difference(trained: dict[str, dict[str, torch.Tensor]], values: str, bit: int) -> None:
    changed = {table: {name: value.clone() for name, value in all_.items()} for table, all_ in trained.items()}
    assert not any(differences(changed, trained).values())
    changed["mean_4"][values].view(torch.int32)[3, 1] ^= 1 << bit if bit < 31 else -(1 << 31)
    (found,) = differences(changed, trained)["mean_4"]
    assert found.startswith(f"{values}: 1 of 80 values differ")
    assert not differences(changed, trained)["sum_4"]


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "OPTIMIZERS", ("sgd",))
    monkeypatch.setattr(exactness, "KINDS", ("bags",))
    monkeypatch.setattr(exactness, "LANES", (("torch", "staging"),))


def run_exactness(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the report."""
    status = run(parse_options(["--rehearse", "--parts", "exactness", "--copy-to", str(folder), *arguments]))
    return status, json.loads((folder / "gpu.json").read_text())


@pytest.mark.usefixtures("few_checks")
def test_one_wrong_bit_makes_the_program_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_exactness(tmp_path)[0] == 0

    def with_a_wrong_bit(one: Tables, other: Tables) -> dict[str, list[str]]:
        wrong = {table: {name: value.clone() for name, value in values.items()} for table, values in one.items()}
        wrong["sum_3"]["weight"].view(torch.int32)[0, 0] ^= 1
        return differences(wrong, other)

    monkeypatch.setattr(exactness, "differences", with_a_wrong_bit)
    status, report = run_exactness(tmp_path)
    assert status == 1 and report["failed"] == ["exactness"]
    failures = report["parts"]["exactness"]["failures"]
    assert len(failures) == len(exactness.DEPTHS)
    assert all("sum, dim 3, torch, staging" in failure and "1 of 90 values" in failure for failure in failures)
    assert [one["met"] for one in report["findings"] if one["part"] == "exactness"] == [False]
    assert "FAILED: sgd, sum, dim 3" in capsys.readouterr().out


@pytest.mark.usefixtures("few_checks")
def test_a_cache_that_nothing_leaves_tests_nothing(tmp_path: Path) -> None:
    status, report = run_exactness(tmp_path, "--exact-cache", "100%")
    assert status == 1
    assert report["parts"]["exactness"]["passed"] == 0
    assert "no changed row left the cache" in report["parts"]["exactness"]["failures"][0]


def small_options(*arguments: str) -> Options:
    return parse_options(["--rehearse", "--rows", "50", "--batch-size", "16", "--warm-batches", "2", *arguments])


@pytest.mark.parametrize("source", ["memory", "parquet"])
def test_batches_are_the_same_from_memory_and_from_parquet(source: str, tmp_path: Path) -> None:
    batches = ClickBatches(small_options("--source", source), tmp_path, 4, CPU)
    try:
        blocks = [list(batches.block(first, 2)) for first in (0, 2, 4)]
    finally:
        batches.close()
    ids = [batch.sparse.values() for block in blocks for batch in block]
    assert [len(block) for block in blocks] == [2, 2, 2] and all(len(batch.labels) == 16 for batch in blocks[0])
    assert not torch.equal(ids[0], ids[1])


def test_fbgemms_contender_trains(tmp_path: Path) -> None:
    options = small_options()
    batches = ClickBatches(options, tmp_path, 3, CPU)
    contender = ManagedCaching(options, CPU, share=10.0)
    before = [weights.clone() for weights in contender._embeddings.split_embedding_weights()]
    try:
        assert len(list(contender.steps(batches.block(0, 3), depth=4))) == 3
    finally:
        batches.close()
    assert not any(
        torch.equal(weights, old)
        for weights, old in zip(contender._embeddings.split_embedding_weights(), before, strict=True)
    )
