"""Columns of every type become the numbers that NumPy and plain Python say."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys_offload.data import Batch, DataSettings, Encoding
from recsys_offload.data.arrays import one_array
from recsys_offload.data.hashing import hash_array
from tests.data.tables import expected_rows, hash_in_python, open_batches, rows_of, write_files

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
REALS = [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(12, 4)]


def read(folder: Path, columns: dict[str, Any], **settings: Any) -> Batch:
    """All rows as one batch; the label is made up."""
    table = pa.table({"label": np.arange(len(next(iter(columns.values())))) % 2, **columns})
    paths = write_files(folder, table, [table.num_rows], 1000)
    (batch,) = open_batches(DataSettings.model_validate({"train": paths} | settings), batch_size=1000)
    return batch


def whole_values(kind: pa.DataType) -> list[int | None]:
    """Values of an integer type, the extremes and a null among them."""
    extremes = np.iinfo(kind.to_pandas_dtype())
    return [0, 1, 5, 100, None, int(extremes.max), int(extremes.min)]


@pytest.mark.parametrize("kind", [*INTEGERS, *REALS, pa.bool_()], ids=str)
@pytest.mark.parametrize("transform", ["none", "log1p", "standardize"])
def test_dense_columns_of_every_type(tmp_path: Path, kind: pa.DataType, transform: str) -> None:
    values: list[Any] = whole_values(kind) if kind in INTEGERS else [0.0, -2.5, 1.25, None, 100.0, 5000.0, -1.0]
    if kind == pa.bool_():
        values = [True, False, None, True]
    elif pa.types.is_decimal(kind):
        values = [None if value is None else decimal.Decimal(value) for value in values]
    elif kind in REALS:
        values.append(float("nan"))
    array = pa.array(
        [np.float16(v) if v is not None else None for v in values] if kind == pa.float16() else values, kind
    )
    batch = read(tmp_path, {"x": array}, dense={"x": {"transform": transform, "fill": 0.25}})
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    present = numbers[~np.isnan(numbers)]
    expected = numbers
    if transform == "log1p":
        expected = np.sign(numbers) * np.log1p(np.abs(numbers))
    elif transform == "standardize":
        expected = (numbers - present.mean()) / present.std()
    expected = np.where(np.isnan(numbers), 0.25, expected).astype(np.float32)
    np.testing.assert_allclose(batch.dense[:, 0].numpy(), expected, rtol=0 if transform == "none" else 2e-7, atol=1e-7)


def test_dense_columns_keep_the_order_of_the_settings(tmp_path: Path) -> None:
    columns = {"a": [1, 2], "b": pa.array([3.0, None]), "c.d": [5, 6]}
    dense: dict[str, Any] = {"second": {"column": "b", "fill": 9}, "c.d": {}, "first": {"column": "a"}, "b": {}}
    batch = read(tmp_path, columns, dense=dense)
    assert batch.dense.tolist() == [[3, 5, 1, 3], [9, 6, 2, 0]]
    assert batch.sparse.keys() == [] and batch.sparse.stride() == 2


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_ids_of_every_width_pass_as_they_are(tmp_path: Path, kind: pa.DataType) -> None:
    # Also those outside the table, and negative ones: the table decides what becomes of them.
    values = [v if kind != pa.uint64() or v is None or v < 2**63 else 2**63 - 1 for v in whole_values(kind)]
    batch = read(tmp_path, {"id": pa.array(values, kind)}, sparse={"id": {"num_embeddings": 10}})
    assert batch.sparse.values().tolist() == [value for value in values if value is not None]
    assert batch.sparse.lengths().tolist() == [1, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("nulls", ["skip", 7])
@pytest.mark.parametrize("values", ["integers", "strings"])
def test_lists_of_fixed_size(tmp_path: Path, nulls: Any, values: str) -> None:
    rows = [[1, 2], None, [3, None], [None, None], [5, 6]]
    if values == "strings":
        rows = [None if row is None else [None if v is None else f"v{v}" for v in row] for row in rows]  # type: ignore[misc]
    kind = pa.list_(pa.int16() if values == "integers" else pa.string(), 2)
    encoding = "ids" if values == "integers" else "hash"
    columns = {"id": pa.array(rows, kind)}
    settings = {"sparse": {"id": {"num_embeddings": 10, "nulls": nulls, "encoding": encoding}}}
    batch = read(tmp_path, columns, **settings)
    expected = []
    for row in rows:
        bag = [None] if row is None else row
        encoded = [v if v is None or values == "integers" else hash_in_python(v, 0) % 10 for v in bag]
        expected.append([7 if v is None else v for v in encoded if v is not None or nulls == 7])
    assert [row.ids[0] for row in rows_of([batch])] == expected


@pytest.mark.parametrize("nulls", ["skip", 3])
def test_scalar_ids_may_have_weights(tmp_path: Path, nulls: Any) -> None:
    columns = {
        "id": pa.array([1, 2, None, 4], pa.uint8()),
        "w": pa.array([2, 3, None, 5], pa.int8()),
        "other": [[1], [], [2, 3], [4]],
    }
    sparse = {"id": {"num_embeddings": 9, "weights": "w", "nulls": nulls}, "other": {"num_embeddings": 9}}
    batch = read(tmp_path, columns, sparse=sparse)
    skips = nulls == "skip"
    assert batch.sparse.values().tolist() == [1, 2, 4, 1, 2, 3, 4] if skips else [1, 2, 3, 4, 1, 2, 3, 4]
    # A feature without weights counts each id once, and so does a null that stands for a row.
    assert batch.sparse.weights().tolist() == ([2, 3, 5] if skips else [2, 3, 1, 5]) + [1, 1, 1, 1]


@pytest.mark.parametrize("nulls", ["skip", 9])
def test_null_lists_and_empty_lists_of_ids_have_no_weights(tmp_path: Path, nulls: Any) -> None:
    # Whether a list is null or empty on the other side does not matter.
    ids = [[1, None], None, None, [], [], [2]]
    weights = [[0.5, None], None, [], None, [], [4.0]]
    batch = read(
        tmp_path, {"id": ids, "w": weights}, sparse={"id": {"num_embeddings": 10, "weights": "w", "nulls": nulls}}
    )
    found = [(row.ids[0], row.weights[0]) for row in rows_of([batch])]
    none: tuple[list[int], list[float]] = ([], [])
    if nulls == "skip":
        assert found == [([1], [0.5]), none, none, none, none, ([2], [4.0])]
    else:
        assert found == [([1, 9], [0.5, 1.0]), ([9], [1.0]), ([9], [1.0]), none, none, ([2], [4.0])]


def test_features_may_share_a_column(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1, 1], "word": ["a", None, "b"], "number": [7, 8, None]})
    paths = write_files(tmp_path, table, [3], 2)
    content = {
        "train": paths,
        "dense": {"number": {"transform": "log1p"}},
        "sparse": {
            "number": {"num_embeddings": 10},
            "hashed": {"column": "number", "encoding": "hash", "num_embeddings": 5, "nulls": 2},
            "word": {"encoding": "vocabulary", "num_embeddings": 5},
            "word_again": {"column": "word", "encoding": "hash", "num_embeddings": 3},
            "number_known": {"column": "number", "encoding": "vocabulary", "num_embeddings": 2},
        },
    }
    chosen = DataSettings.model_validate(content)
    batches = open_batches(chosen, batch_size=2)
    assert batches.steps_per_epoch == 2
    assert list(rows_of(batches)) == expected_rows(table, chosen, Encoding.fit(chosen))


def test_dictionaries_may_differ_between_chunks() -> None:
    chunked = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "a"]).dictionary_encode()])
    hashes = hash_array(one_array(chunked), 5).tolist()
    assert hashes == [hash_in_python(value, 5) for value in ("a", "b", "c", "a")]
    assert hashes == hash_array(one_array(chunked.cast(pa.string())), 5).tolist()


def test_a_hash_covers_the_table_and_nothing_else(tmp_path: Path) -> None:
    sparse = {"id": {"num_embeddings": 7, "encoding": "hash"}}
    found = [
        read(tmp_path, {"id": list(range(200))}, sparse=sparse, hash_seed=seed).sparse.values().tolist()
        for seed in (0, 1)
    ]
    assert set(found[0]) == set(found[1]) == set(range(7)) and found[0] != found[1]
