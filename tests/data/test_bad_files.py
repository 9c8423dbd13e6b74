"""What is wrong with a file or a column is said at once, with its name and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from recsys_offload.data import DataSettings, Encoding
from tests.data.tables import open_batches, write_files

GOOD = {
    "label": [0, 1, 0],
    "age": [1.5, None, 3.0],
    "user": [1, 2, 3],
    "tags": [[1, 2], [], [3]],
    "tag_weights": [[0.5, 1.0], [], [2.0]],
    "name": ["a", "b", None],
}
SETTINGS: dict[str, Any] = {
    "dense": {"age": {}},
    "sparse": {
        "user": {"num_embeddings": 10},
        "tags": {"num_embeddings": 10, "weights": "tag_weights"},
        "name": {"encoding": "vocabulary", "num_embeddings": 10},
    },
}


def read(folder: Path, columns: dict[str, Any], part: str = "train", **changes: Any) -> None:
    paths = write_files(folder, pa.table(columns), [len(columns["label"])], 2)
    list(open_batches(DataSettings.model_validate(SETTINGS | {"train": paths} | changes), part))


def test_the_good_table_is_read(tmp_path: Path) -> None:
    read(tmp_path, GOOD)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": [0, 1, 2]}, r"label column 'label': 2 in row 2 of .*part-00.parquet; a label is 0 or 1"),
        ({"label": [0, None, 1]}, "label column 'label': null in row 1"),
        ({"label": [0.0, 0.5, 1.0]}, r"label column 'label': 0\.5 in row 1"),
        ({"label": ["no", "yes", "no"]}, "column 'label' is string, but the label needs numbers"),
        ({"age": ["x", "y", "z"]}, "column 'age' is string, but a dense feature needs numbers"),
        ({"age": [[1.0], [2.0], [3.0]]}, r"column 'age' is list<.*>, but a dense feature needs one number per row"),
        ({"age": [1.0, 2.0, float("inf")]}, "column 'age': inf in row 2 of .* has no finite float32 value"),
        ({"age": [1.0, 1e300, 2.0]}, r"column 'age': 1e\+300 in row 1 of"),
        ({"age": pa.array([None, None, None], pa.float64())}, "column 'age' holds only nulls"),
        ({"age": pa.nulls(3)}, "column 'age' holds only nulls"),
        ({"tags": [[], [], []]}, "column 'tags' holds only nulls or empty lists, and is of type list<element: null>"),
        ({"tags": pa.array([[], [], []], pa.list_(pa.int8()))}, "column 'tags' holds only nulls or empty lists; leave"),
        ({"user": ["u", "v", "w"]}, "column 'user' is string, but encoding ids needs integers; use encoding hash"),
        ({"user": [1.0, 2.0, 3.0]}, "column 'user' is double, but encoding ids needs integers; write it as"),
        ({"user": pa.array([1, 2, 2**63], pa.uint64())}, "column 'user': id 9223372036854775808 does not fit"),
        ({"tags": [[1], [2], [3]]}, r"weights column 'tag_weights': 2 weights for 1 ids of column 'tags' in row 0"),
        ({"tag_weights": [1.0, 2.0, 3.0]}, "weights column 'tag_weights' is double, but its ids 'tags' are list"),
        (
            {"tag_weights": [[0.5, None], [], [2.0]]},
            "'tag_weights': None in row 0 of .*; it must hold one finite number",
        ),
        ({"name": [1.5, 2.5, 3.5]}, "column 'name' is double, but a vocabulary is made of strings or integers"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, GOOD | changed)


def test_a_missing_column_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    columns = {("users" if name == "user" else name): values for name, values in GOOD.items()}
    with pytest.raises(
        ValueError, match=r"part-00.parquet: no column 'user'; did you mean 'users'\? Its columns: label"
    ):
        read(tmp_path, columns)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), None])
def test_sample_weights_are_finite_and_not_negative(tmp_path: Path, weight: float | None) -> None:
    with pytest.raises(ValueError, match=r"sample_weight column 'w': .* in row 1 of"):
        read(tmp_path, GOOD | {"w": [1.0, weight, 2.0]}, sample_weight="w")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.99])
def test_a_truncated_or_empty_file_is_named(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "cut.parquet"
    pq.write_table(pa.table(GOOD), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    message = r"cut.parquet: the file is empty \(0 bytes\)" if kept == 0 else "cut.parquet: not a readable Parquet file"
    with pytest.raises(ValueError, match=message):
        Encoding.fit(DataSettings.model_validate(SETTINGS | {"train": str(path)}))


def test_damage_inside_a_file_is_named_with_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    table = pa.table({"label": [i % 2 for i in range(5000)], "user": list(range(5000))})
    pq.write_table(table, path, compression="zstd", row_group_size=2500, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200:2000] = b"\xff" * 1800
    path.write_bytes(content)
    chosen = DataSettings.model_validate({"train": str(path), "sparse": {"user": {"num_embeddings": 5000}}})
    with pytest.raises(ValueError, match=r"damaged.parquet, row group 0: cannot be read, the file is damaged"):
        list(open_batches(chosen))


def test_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table(GOOD).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"none.parquet hold no rows"):
        Encoding.fit(DataSettings.model_validate(SETTINGS | {"train": str(path)}))


def test_files_of_different_schemas(tmp_path: Path) -> None:
    pq.write_table(pa.table(GOOD), tmp_path / "a.parquet")
    pq.write_table(pa.table(GOOD | {"user": ["1", "2", "3"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet: column 'user' is string, but int64 in .*a.parquet"):
        Encoding.fit(DataSettings.model_validate(SETTINGS | {"train": str(tmp_path)}))


def test_an_empty_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the validation part is empty: check data\.split"):
        read(tmp_path, GOOD, part="validation")
    split = {"by": "column", "column": "name", "train": ["nobody"]}
    with pytest.raises(ValueError, match="the training part is empty"):
        read(tmp_path, GOOD, split=split)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": []}, "train names no file"),
        ({"sparse": {"user": {"num_embeddings": 0}}}, "greater than or equal to 1"),
        ({"sparse": {"user": {"num_embeddings": 5, "nulls": 5}}}, "row 5 is outside a table of 5 rows"),
        ({"split": {"by": "hash", "shares": {"train": 0.5}}}, "the shares must add up to 1, not 0.7"),
        ({"split": {"by": "time", "column": "t", "test_from": 3}}, "give both validation_from and test_from"),
        (
            {"test": "y", "split": {"by": "hash"}},
            "test has files of its own, and split cuts it from the train files too",
        ),
        (
            {"validation": "y", "split": {"by": "column", "column": "c", "train": [1], "validation": [2]}},
            "validation has",
        ),
        ({"split": {"by": "luck"}}, "'hash', 'column', 'time'"),
        ({"dense": {"age": {"fill": 1e39}}}, "less than or equal to 340000"),
        ({"dense": {"age": {"transform": "log"}}}, "'none', 'log1p' or 'standardize'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSettings.model_validate({"train": "x.parquet"} | settings)
