"""Which part of the data a row belongs to."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_offload.data.config import ColumnSplit, HashSplit, Shares, TimeSplit
from recsys_offload.data.files import RowGroup
from recsys_offload.data.hashing import hash_integers, hash_rows

TRAIN, VALIDATION, TEST, NONE = range(4)


def split_columns(split: HashSplit | ColumnSplit | TimeSplit) -> list[str]:
    """The columns that decide."""
    return split.key if isinstance(split, HashSplit) else [split.column]


def _by_share(uniform: np.ndarray, shares: Shares) -> np.ndarray:
    bounds = np.array([shares.train, shares.train + shares.validation])
    return np.searchsorted(bounds, uniform, side="right").astype(np.int8)


def as_number(table: pa.Table, name: str, path: Path) -> np.ndarray:
    """A column of times as numbers: microseconds since 1970 (UTC) for timestamps and dates, others as they are.

    Raises:
        ValueError: the column has nulls or NaN, is no time, or reaches too far from 1970.
    """
    column = table[name]
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        try:
            # Nanoseconds are cut off, which is no loss to worry about; too large a number of seconds is.
            safe = not (pa.types.is_timestamp(kind) and kind.unit == "ns")
            column = column.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=safe).cast(pa.int64())
        except pa.ArrowException as error:
            raise ValueError(f"{path}: split.column {name!r}: {error}") from error
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"{path}: split.column {name!r} is {kind}: a time split needs a timestamp, a date or a number")
    missing = column.null_count
    values = column.to_numpy()
    if not missing and values.dtype.kind == "f":
        missing = np.count_nonzero(np.isnan(values))
    if missing:
        raise ValueError(f"{path}: split.column {name!r} has {missing} nulls: a row without a time has no part")
    return values


def boundary(value: str | int | float, kind: pa.DataType, name: str) -> float:
    """A boundary as the user wrote it, on the scale of ``as_number``.

    Raises:
        ValueError: it is no number, nor a date for a column of times.
    """
    temporal = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    if not temporal:
        if isinstance(value, str):
            raise ValueError(f"split boundary {value!r}: column {name!r} is {kind}, give a number")
        return value
    try:
        moment = datetime.datetime.fromisoformat(str(value))
    except ValueError as error:
        raise ValueError(f"split boundary {value!r}: column {name!r} is {kind}, give an ISO date") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)


def parts_of_rows(
    split: HashSplit | ColumnSplit | TimeSplit,
    group: RowGroup,
    table: pa.Table | None,
    times: tuple[float, float] | None,
) -> np.ndarray:
    """The part of each row of a row group, int8 ``[rows]``: TRAIN, VALIDATION, TEST, or NONE.

    Args:
        split: how the rows are split.
        group: the row group.
        table: its ``split_columns``; None where there are none.
        times: the first time of the validation and of the test part, for a split by time.

    Raises:
        ValueError: a column is not of a type, or has no value, to split by.
    """
    if isinstance(split, HashSplit):
        if split.key:
            assert table is not None
            try:
                bits = hash_rows(table, split.key, split.seed)
            except TypeError as error:
                raise ValueError(f"{group.path}: split.key: {error}; a key holds strings or integers") from error
        else:
            bits = np.empty(group.rows, np.uint64)
            rows = np.arange(group.first_row, group.first_row + group.rows)
            hash_integers(rows, np.uint64(split.seed), bits)
        return _by_share((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53, split.shares)
    assert table is not None
    if isinstance(split, TimeSplit):
        assert times is not None
        values = as_number(table, split.column, group.path)
        return np.searchsorted(np.array(times), values, side="right").astype(np.int8)
    parts = np.full(group.rows, NONE, np.int8)
    for part, names in ((TRAIN, split.train), (VALIDATION, split.validation), (TEST, split.test)):
        if names:
            parts[_is_one_of(table[split.column], names, split.column, group.path)] = part
    return parts


def _is_one_of(column: pa.ChunkedArray, values: list[Any], name: str, path: Path) -> np.ndarray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        return pc.is_in(column, pa.array(values).cast(column.type)).to_numpy()
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(
            f"{path}: split values {values}: column {name!r} is {column.type}, give values of that type"
        ) from error
