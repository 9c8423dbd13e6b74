"""What data/movielens.py and data/open_bandit.py make, and how they behave when run again or without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
OUTPUTS = {"movielens": "ratings.parquet", "open_bandit": "clicks.parquet"}
WITHOUT_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


def run(script: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, **(environment or {})}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=settings, timeout=300)


def fetched(name: str) -> pa.Table:
    """The data set; fetched first where it is not there, as the Makefile does."""
    path = DATA / name / OUTPUTS[name]
    if not path.exists():
        result = run(DATA / f"{name}.py")
        if "pip could not download" in result.stderr:
            pytest.skip(f"{path} is absent and there is no network to fetch it")
        assert result.returncode == 0, result.stderr
    return pq.read_table(path)


@pytest.fixture(scope="module")
def ratings() -> pa.Table:
    return fetched("movielens")


@pytest.fixture(scope="module")
def clicks() -> pa.Table:
    return fetched("open_bandit")


def test_ratings_are_complete(ratings: pa.Table) -> None:
    assert ratings.num_rows == 100_000
    nulls = {name: ratings[name].null_count for name in ratings.column_names}
    assert {name: count for name, count in nulls.items() if count} == {"release_year": 15}
    distinct = {"user_id": 943, "item_id": 1682, "gender": 2, "occupation": 21, "zip_code": 795, "hour": 24}
    assert {name: pc.count_distinct(ratings[name]).as_py() for name in distinct} == distinct
    assert pc.count_distinct(pc.list_flatten(ratings["genres"])).as_py() == 19
    assert pc.min(pc.list_value_length(ratings["genres"])).as_py() == 1


def test_rating_labels_say_liked(ratings: pa.Table) -> None:
    assert ratings["label"].type == pa.int8()
    assert pc.mean(ratings["label"]).as_py() == pytest.approx(0.55375)
    assert ratings["label"].cast(pa.bool_()).equals(pc.greater_equal(ratings["rating"], 4))


def test_a_rating_has_its_users_and_its_items_features(ratings: pa.Table) -> None:
    row = ratings.filter((pc.field("user_id") == 196) & (pc.field("item_id") == 242)).to_pylist()
    assert row == [
        {
            "label": 0, "rating": 3, "user_id": 196, "item_id": 242, "age": 49, "gender": "M", "occupation": "writer",
            "zip_code": "55105", "release_year": 1996, "genres": ["Comedy"], "hour": 15, "weekday": 3,
            "timestamp": 881250949,
        }
    ]  # fmt: skip
    one_item = ratings.filter(pc.field("item_id") == 50).select(["release_year", "genres"]).to_pylist()
    assert len(one_item) == 583
    star_wars = {"release_year": 1977, "genres": ["Action", "Adventure", "Romance", "Sci-Fi", "War"]}
    assert all(features == star_wars for features in one_item)


def test_clicks_are_complete(clicks: pa.Table) -> None:
    assert clicks.num_rows == 60_000
    assert all(clicks[name].null_count == 0 for name in clicks.column_names)
    assert pc.sum(clicks["label"]).as_py() == 38 + 46 + 46 + 42 + 69 + 46
    parts = clicks.group_by(["policy", "campaign"]).aggregate([([], "count_all")])
    assert parts.num_rows == 6 and set(parts["count_all"].to_pylist()) == {10_000}
    assert pc.count_distinct(clicks["item_id"]).as_py() == 160
    assert set(pc.unique(clicks["position"]).to_pylist()) == {1, 2, 3}
    assert pc.min(clicks["propensity_score"]).as_py() > 0
    assert clicks["timestamp"].equals(clicks["timestamp"].take(pc.sort_indices(clicks["timestamp"])))


def test_an_item_has_the_same_features_wherever_it_is_shown(clicks: pa.Table) -> None:
    features = [f"item_feature_{index}" for index in range(4)]
    items = clicks.group_by("item_id").aggregate([(name, "count_distinct") for name in features])
    for name in features:
        assert set(items[f"{name}_count_distinct"].to_pylist()) == {1}


def test_affinities_agree_with_the_shown_items(clicks: pa.Table) -> None:
    assert pc.list_value_length(clicks["affinity_items"]).equals(pc.list_value_length(clicks["affinity_weights"]))
    assert pc.list_flatten(clicks["affinity_items"]).length() == 3124
    for row in clicks.filter(pc.field("affinity") > 0).to_pylist():
        weights = dict(zip(row["affinity_items"], row["affinity_weights"], strict=True))
        assert weights[row["item_id"]] == row["affinity"]
    first_item = {"all": 0, "men": 80, "women": 114}
    for row in clicks.filter(pc.list_value_length(pc.field("affinity_items")) > 0).to_pylist():
        assert min(row["affinity_items"]) >= first_item[row["campaign"]]


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_there_is_left_alone(name: str, ratings: pa.Table, clicks: pa.Table) -> None:
    path = DATA / name / OUTPUTS[name]
    before = path.stat()
    result = run(DATA / f"{name}.py", WITHOUT_NETWORK)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize("name", OUTPUTS)
def test_without_a_network_the_error_says_what_to_do(name: str, tmp_path: Path) -> None:
    for script in ("wheel.py", f"{name}.py"):
        shutil.copy(DATA / script, tmp_path)
    result = run(tmp_path / f"{name}.py", WITHOUT_NETWORK)
    assert result.returncode == 1
    assert "error: pip could not download" in result.stderr and "PIP_FIND_LINKS=<folder" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_damaged_file_is_made_anew_and_two_runs_do_not_collide(ratings: pa.Table, tmp_path: Path) -> None:
    for script in ("wheel.py", "movielens.py"):
        shutil.copy(DATA / script, tmp_path)
    path = tmp_path / "movielens" / "ratings.parquet"
    path.parent.mkdir()
    whole = (DATA / "movielens" / "ratings.parquet").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    command = [sys.executable, tmp_path / "movielens.py"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in runs]
    if any("pip could not download" in errors for _, errors in outputs):
        pytest.skip("there is no network")
    assert [process.returncode for process in runs] == [0, 0]
    assert sorted(len(text.splitlines()) for text, _ in outputs) == [0, 1]  # one of them built it
    assert pq.read_table(path).equals(ratings)
    assert {found.name for found in path.parent.iterdir()} == {"ratings.parquet", ".lock"}
