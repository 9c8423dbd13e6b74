"""What is learned from the training part, how rows are split, and the hash."""

from __future__ import annotations

import collections
import datetime
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys_offload.data import DataSettings, Encoding, ParquetBatches
from recsys_offload.data import encoding as encoding_module
from recsys_offload.data.hashing import hash_array
from tests.data.tables import hash_in_python, open_batches, write_files

PARTS = ("train", "validation", "test")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())])
def test_strings_are_hashed_as_documented(kind: pa.DataType) -> None:
    values = ["", "a", "hello", "ünïcode ☃", "x" * 1000]
    array = pa.array([value.encode() for value in values] if kind == pa.binary() else values, kind)
    for seed in (0, 7):
        assert hash_array(array, seed).tolist() == [hash_in_python(value, seed) for value in values]
    assert hash_array(array[2:4], 7).tolist() == [hash_in_python(value, 7) for value in values[2:4]]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_integers_are_hashed_as_documented(kind: pa.DataType) -> None:
    values = [0, 1, 77, 127] + ([-1, -128] if not str(kind).startswith("u") else [])
    values += [2**64 - 1] if kind == pa.uint64() else []
    assert hash_array(pa.array(values, kind), 3).tolist() == [hash_in_python(value, 3) for value in values]


def test_hashes_spread_evenly() -> None:
    rows = hash_array(pa.array([f"user-{i}" for i in range(20_000)]), 0) % np.uint64(100)
    counts = np.bincount(rows.astype(int), minlength=100)
    assert ((counts - 200) ** 2 / 200).sum() < 150  # chi-square, 99 degrees of freedom: p < 0.001 above 148


def make(folder: Path, rows: int = 4000, **changes: Any) -> DataSettings:
    random = np.random.default_rng(1)
    days = random.integers(0, 100, rows)
    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "label": random.integers(0, 2, rows),
            "number": np.arange(rows),
            "user": random.integers(0, 300, rows),
            "day": days,
            "when": pa.array([start + datetime.timedelta(days=int(day)) for day in days], pa.timestamp("ms", "UTC")),
            "date": pa.array([(start + datetime.timedelta(days=int(day))).date() for day in days]),
            "fold": pa.array(np.array(["a", "b", "c", "d"])[random.integers(0, 4, rows)]).dictionary_encode(),
            "height": random.normal(180.0, 9.0, rows),
            "city": [f"city-{int(n)}" for n in random.zipf(1.5, rows) % 40],
        }
    )
    paths = write_files(folder, table, [rows // 2, rows - rows // 2], 500)
    content = {"train": paths, "sparse": {"number": {"num_embeddings": rows}}, "dense": {"day": {}}}
    return DataSettings.model_validate(content | changes)


def numbers(chosen: DataSettings, encoding: Encoding) -> dict[str, list[int]]:
    """The rows of each part, by their number."""
    found: dict[str, list[int]] = {}
    for part in PARTS:
        if encoding.rows.get(part):
            batches = ParquetBatches(chosen, encoding, part, 512)  # type: ignore[arg-type]
            found[part] = [number for batch in batches for number in batch.sparse["number"].values().tolist()]
            assert batches.rows == encoding.rows[part] == len(found[part])
    return found


@pytest.mark.parametrize(
    "split",
    [
        {"by": "hash", "seed": 3},
        {"by": "hash", "key": "user"},
        {"by": "hash", "key": ["user", "city"]},
        {"by": "time", "column": "day"},
        {"by": "time", "column": "when"},
        {"by": "time", "column": "date"},
    ],
)
def test_splits_by_share_are_disjoint_complete_and_of_the_right_size(tmp_path: Path, split: dict[str, Any]) -> None:
    chosen = make(tmp_path, split=split)
    parts = numbers(chosen, Encoding.fit(chosen))
    assert sorted(number for part in parts.values() for number in part) == list(range(4000))
    for part, share in zip(PARTS, (0.8, 0.1, 0.1), strict=True):
        assert abs(len(parts[part]) / 4000 - share) < 0.04, part


def test_a_key_keeps_rows_together_and_a_seed_changes_the_split(tmp_path: Path) -> None:
    chosen = make(tmp_path, split={"by": "hash", "key": "user"}, dense={"user": {}})
    users = {}
    for part in PARTS:
        batches = ParquetBatches(chosen, Encoding.fit(chosen), part, 512)  # type: ignore[arg-type]
        users[part] = {user for batch in batches for user in batch.dense[:, 0].tolist()}
    assert not users["train"] & users["test"] and not users["train"] & users["validation"]
    first, second = (make(tmp_path, split={"by": "hash", "seed": seed}) for seed in (0, 1))
    assert numbers(first, Encoding.fit(first))["test"] != numbers(second, Encoding.fit(second))["test"]


@pytest.mark.parametrize(
    ("column", "validation_from", "test_from"),
    [("day", 70, 90), ("when", "2024-03-11", "2024-03-31T00:00:00+00:00"), ("date", "2024-03-11", "2024-03-31")],
)
def test_times_can_be_given(tmp_path: Path, column: str, validation_from: Any, test_from: Any) -> None:
    split = {"by": "time", "column": column, "validation_from": validation_from, "test_from": test_from}
    chosen = make(tmp_path, split=split)
    encoding = Encoding.fit(chosen)
    days = {
        part: [day for batch in ParquetBatches(chosen, encoding, part, 512) for day in batch.dense[:, 0].tolist()]  # type: ignore[arg-type]
        for part in PARTS
    }
    assert max(days["train"]) == 69 and min(days["validation"]) == 70
    assert max(days["validation"]) == 89 and min(days["test"]) == 90


def test_a_column_can_name_the_parts(tmp_path: Path) -> None:
    chosen = make(tmp_path, split={"by": "column", "column": "fold", "train": ["a", "b"], "test": ["d"]})
    encoding = Encoding.fit(chosen)
    parts = numbers(chosen, encoding)
    assert set(parts) == {"train", "test"}
    assert abs(len(parts["train"]) - 2000) < 200 and abs(len(parts["test"]) - 1000) < 150
    wrong = make(tmp_path, split={"by": "column", "column": "day", "train": ["monday"]})
    with pytest.raises(ValueError, match=r"split values \['monday'\]: column 'day' is int64"):
        Encoding.fit(wrong)
    with pytest.raises(ValueError, match=r"split boundary 'soon': column 'when' is timestamp.*give an ISO date"):
        times = {"by": "time", "column": "when", "validation_from": "soon", "test_from": "later"}
        Encoding.fit(make(tmp_path, split=times))


def test_parts_may_have_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = make(tmp_path / "own", rows=100).train
    chosen = make(tmp_path, validation=own[0])
    encoding = Encoding.fit(chosen)
    assert encoding.rows == {"train": 4000, "validation": 50}
    assert numbers(chosen, encoding)["validation"] == list(range(50))
    # The other part may still be cut from the train files.
    shares = {"train": 0.75, "validation": 0, "test": 0.25}
    chosen = make(tmp_path, validation=own, split={"by": "hash", "shares": shares})
    found = numbers(chosen, Encoding.fit(chosen))
    assert sorted(found["train"] + found["test"]) == list(range(4000)) and len(found["test"]) > 900
    assert found["validation"] == list(range(100))


def test_only_the_training_part_is_learned_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {
        "split": {"by": "time", "column": "number", "validation_from": 1000, "test_from": 2000},
        "dense": {"height": {"transform": "standardize"}},
        "sparse": {
            "number": {"encoding": "vocabulary", "num_embeddings": 5000},
            "city": {"encoding": "vocabulary", "num_embeddings": 6},
        },
    }
    chosen = make(tmp_path, **changes)
    with caplog.at_level(logging.WARNING):
        encoding = Encoding.fit(chosen)
    assert "sparse feature 'city' has" in caplog.text and "all but the 5 most frequent share row 0" in caplog.text
    assert sorted(encoding.vocabularies["number"].to_pylist()) == list(range(1000))
    assert len(encoding.vocabularies["city"]) == 5
    train = np.concatenate([batch.dense[:, 0].numpy() for batch in ParquetBatches(chosen, encoding, "train", 512)])
    assert len(train) == 1000
    assert abs(train.mean()) < 1e-5 and abs(train.std() - 1) < 1e-5
    unseen = [b.sparse["number"].values() for b in ParquetBatches(chosen, encoding, "test", 512)]
    assert all((values == 0).all() for values in unseen)


def test_a_vocabulary_is_ordered_by_frequency_then_value(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1] * 4, "word": ["b", "c", "c", "a", "b", "d", None, "c"]})
    paths = write_files(tmp_path, table, [8], 3)
    sparse = {"word": {"encoding": "vocabulary", "num_embeddings": 9}}
    encoding = Encoding.fit(DataSettings.model_validate({"train": paths, "sparse": sparse}))
    assert encoding.vocabularies["word"].to_pylist() == ["c", "b", "a", "d"]


def test_what_was_learned_is_saved_and_loaded(tmp_path: Path) -> None:
    chosen = make(
        tmp_path,
        split={"by": "time", "column": "when"},
        dense={"height": {"transform": "standardize"}},
        sparse={
            "city": {"encoding": "vocabulary", "num_embeddings": 60},
            "user": {"encoding": "vocabulary", "num_embeddings": 400},
            "number": {"num_embeddings": 4000},
        },
    )
    encoding = Encoding.fit(chosen)
    encoding.save(tmp_path / "encoding")
    loaded = Encoding.load(tmp_path / "encoding")
    assert (loaded.moments, loaded.times, loaded.rows) == (encoding.moments, encoding.times, encoding.rows)
    assert all(loaded.vocabularies[name].equals(values) for name, values in encoding.vocabularies.items())
    with pytest.raises(FileNotFoundError, match=r"encoding.json: no such file; the run folder is incomplete"):
        Encoding.load(tmp_path / "nowhere")
    (tmp_path / "encoding" / "encoding.json").write_text("{")
    with pytest.raises(ValueError, match="damaged or written by another version"):
        Encoding.load(tmp_path / "encoding")


def test_own_constant_columns_do_not_divide_by_zero(tmp_path: Path) -> None:
    paths = write_files(tmp_path, pa.table({"label": [0, 1], "same": [4.0, 4.0]}), [2], 2)
    chosen = DataSettings.model_validate({"train": paths, "dense": {"same": {"transform": "standardize"}}})
    (batch,) = open_batches(chosen)
    assert batch.dense.tolist() == [[0.0], [0.0]]


def test_a_column_of_one_value_that_binary_cannot_hold_is_constant_too(tmp_path: Path) -> None:
    paths = write_files(tmp_path, pa.table({"label": [0] * 12, "x": [0.1] * 12}), [12], 5)
    chosen = DataSettings.model_validate({"train": paths, "dense": {"x": {"transform": "standardize"}}})
    (batch,) = open_batches(chosen, batch_size=12)
    assert batch.dense.abs().max() < 1e-6


def test_moments_are_those_of_numpy_even_far_from_zero(tmp_path: Path) -> None:
    values = 1.7e15 + np.random.default_rng(0).normal(size=3000) * 1e6
    paths = write_files(tmp_path, pa.table({"label": [0] * 3000, "x": values}), [1000, 2000], 170)
    chosen = DataSettings.model_validate({"train": paths, "dense": {"x": {"transform": "standardize"}}})
    assert Encoding.fit(chosen).moments["x"] == pytest.approx((values.mean(), values.std()), rel=1e-7)


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({"x": [1.0, 1e200]}, {"dense": {"x": {"transform": "standardize"}}}, "'x' cannot be .* values are too large"),
        ({"x": [None, 1.0]}, {"dense": {"x": {"transform": "standardize"}}}, "'x' cannot be .* no value in the train"),
        ({"x": [None, "a"]}, {"sparse": {"x": {"encoding": "vocabulary", "num_embeddings": 3}}}, "'x' has no vocab"),
    ],
)
def test_features_of_which_nothing_can_be_learned(
    tmp_path: Path, columns: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    paths = write_files(tmp_path, pa.table({"label": [0, 1], "fold": [0, 1]} | columns), [2], 2)
    parts = {"train": [0], "test": [1]} if "no v" in message or "no value" in message else {"train": [0, 1]}
    split = {"by": "column", "column": "fold"} | parts
    with pytest.raises(ValueError, match=message):
        Encoding.fit(DataSettings.model_validate({"train": paths, "split": split} | settings))


def test_counts_of_a_vocabulary_are_merged_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module, "COUNTS_PENDING", 30)
    random = np.random.default_rng(0)
    words = [[f"w{int(n)}" for n in random.zipf(1.3, 20) % 50] for _ in range(100)]
    counts: list[pa.Table] = []
    for group in words:
        encoding_module._add_counts(counts, pa.array(group))
        assert sum(part.num_rows for part in counts) <= 50 + max(30, 50) + 20
    expected = collections.Counter(word for group in words for word in group)
    order = sorted(expected, key=lambda word: (-expected[word], word))
    assert encoding_module._vocabulary("word", counts, 1000).to_pylist() == order


def test_an_encoding_of_other_settings_is_refused(tmp_path: Path) -> None:
    chosen = make(tmp_path)
    encoding = Encoding.fit(chosen)
    for changes, missing in (
        ({"dense": {"height": {"transform": "standardize"}}}, "height"),
        ({"sparse": {"city": {"encoding": "vocabulary", "num_embeddings": 9}}}, "city"),
        ({"split": {"by": "time", "column": "day"}}, "split"),
    ):
        with pytest.raises(ValueError, match=f"fitted with other settings: it has nothing for {missing}"):
            ParquetBatches(make(tmp_path, **changes), encoding, "train", 8)


def test_a_feature_may_have_any_name(tmp_path: Path) -> None:
    names = ["a/b", "..", "ü % x"]
    paths = write_files(tmp_path, pa.table({"label": [0], **{name: [name] for name in names}}), [1], 1)
    sparse = {name: {"encoding": "vocabulary", "num_embeddings": 3} for name in names}
    encoding = Encoding.fit(DataSettings.model_validate({"train": paths, "sparse": sparse}))
    encoding.save(tmp_path / "run" / "encoding")
    loaded = Encoding.load(tmp_path / "run" / "encoding")
    assert {name: values.to_pylist() for name, values in loaded.vocabularies.items()} == {n: [n] for n in names}
    next((tmp_path / "run" / "encoding").glob("vocabulary-a*")).unlink()
    with pytest.raises(ValueError, match=r"encoding.json: damaged or written by another version: .*vocabulary-a"):
        Encoding.load(tmp_path / "run" / "encoding")
