"""Splits that make no sense are refused, and odd times and keys go where they should."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from recsys_offload.data import DataSettings, Encoding, ParquetBatches
from recsys_offload.data import encoding as encoding_module
from tests.data.tables import hash_in_python, write_files

MASK = 2**64 - 1


def fit(folder: Path, columns: dict[str, Any], split: dict[str, Any], **settings: Any) -> tuple[DataSettings, Encoding]:
    rows = len(next(iter(columns.values())))
    paths = write_files(folder, pa.table({"label": [0] * rows, "number": range(rows), **columns}), [rows], 3)
    content = {"train": paths, "sparse": {"number": {"num_embeddings": rows}}, "split": split} | settings
    chosen = DataSettings.model_validate(content)
    return chosen, Encoding.fit(chosen)


def parts(chosen: DataSettings, encoding: Encoding) -> dict[str, list[int]]:
    """The numbers of each part's rows."""
    return {
        part: [n for batch in ParquetBatches(chosen, encoding, part, 4) for n in batch.sparse.values().tolist()]  # type: ignore[arg-type]
        for part in encoding.rows
    }


def part_by_share(bits: int) -> str:
    uniform = (bits >> 11) * 2.0**-53
    return "train" if uniform < 0.5 else "validation" if uniform < 0.8 else "test"


SHARES = {"train": 0.5, "validation": 0.3, "test": 0.2}


def test_rows_are_split_by_the_documented_hash_of_their_number(tmp_path: Path) -> None:
    found = parts(*fit(tmp_path, {"x": range(50)}, {"by": "hash", "shares": SHARES, "seed": 9}))
    expected: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for row in range(50):
        expected[part_by_share(hash_in_python(row, 9))].append(row)
    assert found == expected


def test_keys_are_split_by_the_documented_hash_of_their_values(tmp_path: Path) -> None:
    words = ["a", None, "b", "c", "d", ""] * 8
    numbers = [1, 2, 3, None] * 12
    split = {"by": "hash", "key": ["word", "id"], "shares": SHARES, "seed": 2}
    columns = {"word": pa.array(words).dictionary_encode(), "id": pa.array(numbers, pa.int16())}
    found = parts(*fit(tmp_path, columns, split))
    expected: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for row, key in enumerate(zip(words, numbers, strict=True)):
        bits = 0
        for place, value in enumerate(key):
            bits = hash_in_python(bits ^ (0 if value is None else hash_in_python(value, 2)), 2 + place)
        expected[part_by_share(bits)].append(row)
    assert found == expected


def test_a_part_without_a_share_is_empty(tmp_path: Path) -> None:
    for kind, newest in ((pa.int64(), 9), (pa.float32(), 9.0), (pa.timestamp("s"), 9)):
        for train, validation in ((0.5, 0.5), (1, 0)):
            shares = {"train": train, "validation": validation, "test": 0}
            columns = {"time": pa.array([3, 7, 0, 1, newest, 5, 8, 2, 6, 4], kind)}
            _, encoding = fit(tmp_path, columns, {"by": "time", "column": "time", "shares": shares})
            expected = {"train": 10 * train} | ({"validation": 10 * validation} if validation else {})
            assert encoding.rows == expected, kind


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_timestamps_of_every_unit_and_zone(tmp_path: Path, unit: str, zone: str | None) -> None:
    start = datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)
    ticks = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    moments = [int((start + datetime.timedelta(hours=hour)).timestamp()) * ticks for hour in range(48)]
    moments[0] += ticks // 10**9  # a nanosecond, where there are any
    times = pa.array(moments, pa.int64()).cast(pa.timestamp(unit, zone))
    split = {"by": "time", "column": "t", "validation_from": "2024-03-02", "test_from": "2024-03-02T15:00:00+03:00"}
    found = parts(*fit(tmp_path, {"t": times}, split))
    # Without an offset a time is in UTC, and a column without a zone is in UTC too.
    assert found == {"train": list(range(24)), "validation": list(range(24, 36)), "test": list(range(36, 48))}


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_dates_as_yaml_reads_them(tmp_path: Path, kind: pa.DataType) -> None:
    dates = pa.array([datetime.date(1969, 12, day) for day in (1, 2, 3, 4)], kind)
    split = {"by": "time", "column": "t", "validation_from": datetime.date(1969, 12, 3), "test_from": "1969-12-04"}
    chosen, encoding = fit(tmp_path, {"t": dates}, split)
    assert parts(chosen, encoding) == {"train": [0, 1], "validation": [2], "test": [3]}
    assert DataSettings.model_validate(chosen.model_dump(mode="json")) == chosen


def test_boundaries_by_share_of_very_many_times_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module, "TIMES_SAMPLED", 50)
    times = np.random.default_rng(0).permutation(1000)
    _, encoding = fit(tmp_path, {"t": times}, {"by": "time", "column": "t", "shares": SHARES})
    assert sum(encoding.rows.values()) == 1000
    assert abs(encoding.rows["train"] - 500) < 150 and abs(encoding.rows["validation"] - 300) < 150
    ordered = encoding_module._sampled_times(  # every n-th of times in order, over row groups of three
        encoding_module.open_files(fit(tmp_path, {"t": range(1000)}, {"by": "hash"})[0].train, ["t"]), "t"
    )
    assert ordered[0].tolist() == list(range(0, 1000, 32)) and ordered[1] == 999


@pytest.mark.parametrize("kind", [pa.bool_(), pa.string(), pa.int8(), pa.date32(), pa.float64()])
def test_a_column_of_any_type_can_name_the_parts(tmp_path: Path, kind: pa.DataType) -> None:
    columns, train, test = {
        pa.bool_(): ([True, False, None, True], [True], [False]),
        pa.string(): (["1", "2", None, "1"], [1], ["2"]),
        pa.int8(): ([1, 2, None, 1], ["1"], [2]),
        pa.date32(): ([datetime.date(2024, 1, d) if d else None for d in (1, 2, 0, 1)], ["2024-01-01"], ["2024-01-02"]),
        pa.float64(): ([1.0, 2.0, None, 1.0], [1], [2]),
    }[kind]
    split = {"by": "column", "column": "fold", "train": train, "test": test}
    assert parts(*fit(tmp_path, {"fold": pa.array(columns, kind)}, split)) == {"train": [0, 3], "test": [1]}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"by": "hash", "key": "usr"}, r"part-00.parquet: no column 'usr'; did you mean 'user'\?"),
        ({"by": "hash", "key": ["user", "real"]}, "part-00.parquet: split.key: column 'real': cannot hash .* double"),
        ({"by": "column", "column": "usre", "train": [1]}, r"no column 'usre'; did you mean 'user'\?"),
        ({"by": "column", "column": "lists", "train": [1]}, r"part-00.parquet: split values \[1\]: column 'lists'"),
        ({"by": "column", "column": "tiny", "train": [300]}, r"split values \[300\]: column 'tiny' is int8"),
        ({"by": "time", "column": "tim"}, r"no column 'tim'; did you mean 'time'\?"),
        ({"by": "time", "column": "word"}, "part-00.parquet: split.column 'word' is string: a time split needs a"),
        ({"by": "time", "column": "holes"}, "split.column 'holes' has 1 nulls: a row without a time has no part"),
        ({"by": "time", "column": "nans"}, "split.column 'nans' has 1 nulls: a row without a time has no part"),
        ({"by": "time", "column": "far"}, "part-00.parquet: split.column 'far': .* out of bounds"),
        (
            {"by": "time", "column": "user", "validation_from": 3, "test_from": 2},
            "validation_from 3 is after test_from",
        ),
        ({"by": "time", "column": "user", "validation_from": "a", "test_from": "b"}, "'a': column 'user' .* a number"),
        ({"by": "time", "column": "time", "validation_from": 1e9, "test_from": 2e9}, "is timestamp.* give an ISO date"),
    ],
)
def test_columns_that_cannot_split(tmp_path: Path, split: dict[str, Any], message: str) -> None:
    columns = {
        "user": [1, 2, 3, 4],
        "real": [0.5, 1.5, 2.5, 3.5],
        "lists": [[1], [2], [3], [4]],
        "tiny": pa.array([1, 2, 3, 4], pa.int8()),
        "word": ["a", "b", "c", "d"],
        "time": pa.array([1, 2, 3, 4], pa.timestamp("ms")),
        "holes": [1, 2, None, 4],
        "nans": [1.0, float("nan"), 3.0, 4.0],
        "far": pa.array([1, 2, 3, 2**62], pa.timestamp("ms")),
    }
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, columns, split)


def test_settings_of_splits_that_make_no_sense() -> None:
    for split, message in (
        ({"by": "column", "column": "x", "train": ["a", "b"], "test": ["b"]}, "the value 'b' stands in more than one"),
        ({"by": "hash", "seed": 2**63}, "less than"),
    ):
        with pytest.raises(ValidationError, match=message):
            DataSettings.model_validate({"train": "x", "split": split})


def test_a_bad_row_is_named_as_it_lies_in_the_file(tmp_path: Path) -> None:
    labels = [0, 1, 0, 0, 1, 0, 1, 2, 1]
    table = pa.table({"label": labels, "fold": [0, 1, 0] * 3, "number": range(9)})
    paths = write_files(tmp_path, table, [9], 5)
    split = {"by": "column", "column": "fold", "train": [1], "test": [0]}
    sparse = {"number": {"num_embeddings": 9}}
    chosen = DataSettings.model_validate({"train": paths, "sparse": sparse, "split": split})
    encoding = Encoding.fit(chosen)
    assert len(list(ParquetBatches(chosen, encoding, "test", 4))) == 2
    with pytest.raises(ValueError, match=r"label column 'label': 2 in row 7 of .*part-00.parquet"):
        list(ParquetBatches(chosen, encoding, "train", 4))
    standardized = {"bad": {"column": "real", "transform": "standardize"}}
    infinite = table.append_column("real", pa.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, float("-inf"), 9.0]))
    content = {"train": write_files(tmp_path, infinite, [9], 5), "dense": standardized, "split": split}
    with pytest.raises(ValueError, match=r"column 'real': -inf in row 7 of .*part-00.parquet has no finite"):
        Encoding.fit(DataSettings.model_validate(content))
