"""From decoded Arrow columns to arrays: dense values, bags of ids, labels and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_offload.data.arrays import is_list, one_array, plain
from recsys_offload.data.config import DenseColumn, SparseColumn
from recsys_offload.data.convert_kernels import (
    IDENTITY,
    LOG1P,
    LOG1P_TABLE,
    STANDARDIZE,
    copy_dense_column,
    fill_dense_column,
)
from recsys_offload.data.files import Source
from recsys_offload.data.hashing import hash_array
from recsys_offload.data.vocabulary import VocabularyRows

TRANSFORMS = {"none": IDENTITY, "log1p": LOG1P, "standardize": STANDARDIZE}


@dataclass(frozen=True)
class Bags:
    """The ids of one feature.

    Attributes:
        values: int32 or int64 ``[N]``.
        offsets: int64 ``[rows + 1]``; None where every row has one id.
        weights: float32 ``[N]``, or None.
    """

    values: np.ndarray
    offsets: np.ndarray | None
    weights: np.ndarray | None


def _numeric(array: pa.Array, column: str, purpose: str, source: Source) -> pa.Array:
    """The array in a type that NumPy can view.

    Raises:
        ValueError: the column holds lists or no numbers.
    """
    kind = array.type
    if is_list(kind):
        raise ValueError(
            f"{source.path}: column {column!r} is {kind}, but {purpose} needs one number per row, not a list"
        )
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if pa.types.is_float16(kind):
        return array.cast(pa.float32())
    if pa.types.is_decimal(kind):
        return array.cast(pa.float64())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"{source.path}: column {column!r} is {kind}, but {purpose} needs numbers")
    return array


def _raw_values(array: pa.Array) -> np.ndarray:
    """The data buffer of a numeric array, whatever its nulls."""
    data = array.buffers()[1]
    dtype = np.dtype(array.type.to_pandas_dtype())
    if data is None:
        return np.zeros(len(array), dtype)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def dense_values(table: pa.Table, name: str, feature: DenseColumn, source: Source) -> np.ndarray:
    """The values of a dense feature that are neither null nor NaN, float64, before any transform.

    Raises:
        ValueError: the column is not numeric, or has an infinite value.
    """
    column = feature.column or name
    array = _numeric(one_array(table[column]), column, "a dense feature", source)
    values = array.to_numpy(zero_copy_only=False).astype(np.float64)
    infinite = np.flatnonzero(np.isinf(values))
    if infinite.size:
        raise _not_finite(column, values[infinite[0]], int(infinite[0]), source)
    return values[~np.isnan(values)]


def _not_finite(column: str, value: Any, row: int, source: Source) -> ValueError:
    return ValueError(
        f"column {column!r}: {value} in {source.where(row)} has no finite float32 value after its transform; mend it, "
        "or make it null to have it filled"
    )


def dense_columns(
    table: pa.Table, features: dict[str, DenseColumn], moments: dict[str, tuple[float, float]], source: Source
) -> np.ndarray:
    """The dense features of a row group, transformed, float32 ``[features, rows]``.

    Raises:
        ValueError: a column is not numeric, or has an infinite value.
    """
    output = np.empty((len(features), table.num_rows), np.float32)
    for target, (name, feature) in zip(output, features.items(), strict=True):
        column = feature.column or name
        array = _numeric(one_array(table[column]), column, "a dense feature", source)
        values, transform = _raw_values(array), TRANSFORMS[feature.transform]
        bitmap = array.buffers()[0] if array.null_count else None
        if transform == IDENTITY and bitmap is None and copy_dense_column(values, target):
            continue
        validity = np.empty(0, np.uint8) if bitmap is None else np.frombuffer(bitmap, np.uint8)
        mean, deviation = moments.get(name, (0.0, 1.0))
        bad = fill_dense_column(
            values, validity, array.offset, transform, mean, 1.0 / deviation, feature.fill, LOG1P_TABLE, target
        )
        if bad >= 0:
            raise _not_finite(column, values[bad], bad, source)
    return output


def labels(table: pa.Table, column: str, source: Source) -> np.ndarray:
    """The labels of a row group, float32 ``[rows]``.

    Raises:
        ValueError: a label is null or neither 0 nor 1.
    """
    array = _numeric(one_array(table[column]), column, "the label", source)
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"label column {column!r}: null in {source.where(row)}; a label is 0 or 1")
    values = array.to_numpy()
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"label column {column!r}: {values[row]} in {source.where(row)}; a label is 0 or 1")
    return values.astype(np.float32)


def sample_weights(table: pa.Table, column: str, source: Source) -> np.ndarray:
    """The sample weights of a row group, float32 ``[rows]``.

    Raises:
        ValueError: a weight is null, negative or not finite.
    """
    array = _numeric(one_array(table[column]), column, "the sample weight", source)
    values = array.to_numpy(zero_copy_only=False).astype(np.float32)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"sample_weight column {column!r}: {array[row]} in {source.where(row)}; a weight is finite and not negative"
        )
    return values


def _flatten(array: pa.Array, keep_null_lists: bool) -> tuple[pa.Array, np.ndarray | None]:
    """The values of all lists, and where each list begins; scalars are returned as they are.

    A null list is empty, or with ``keep_null_lists`` holds one null.
    """
    if not is_list(array.type):
        return array, None
    lengths = pc.list_value_length(array)
    values = array.flatten()
    starts = np.concatenate([[0], np.cumsum(lengths.fill_null(0).to_numpy(zero_copy_only=False))]).astype(np.int64)
    if not (keep_null_lists and array.null_count):
        return values, starts
    sizes = lengths.fill_null(1).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    null_lists = array.is_null().to_numpy(zero_copy_only=False)
    positions = np.ma.masked_all(offsets[-1], np.int64)
    at_null = np.zeros(offsets[-1], bool)
    at_null[offsets[:-1][null_lists]] = True
    positions[~at_null] = np.arange(len(values))
    return values.take(pa.array(positions.filled(0), mask=at_null)), offsets


def flat_ids(table: pa.Table, name: str, feature: SparseColumn, source: Source) -> pa.Array:
    """All values of a sparse feature, those in lists too, without nulls and as plain values."""
    values, _ = _flatten(one_array(table[feature.column or name]), keep_null_lists=False)
    values = plain(values).drop_null()
    if not (
        pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_integer(values.type)
    ):
        raise ValueError(
            f"{source.path}: column {feature.column or name!r} is {values.type}, but a vocabulary is made of strings "
            "or integers"
        )
    return values


def _encode(
    values: pa.Array, column: str, feature: SparseColumn, vocabulary: VocabularyRows | None, seed: int
) -> np.ndarray:
    """Rows for values without nulls, int32 or int64."""
    if feature.encoding == "ids":
        if not pa.types.is_integer(values.type):
            text = pa.types.is_string(plain(values).type) or pa.types.is_large_string(plain(values).type)
            hint = "use encoding hash or vocabulary" if text else "write it as integers"
            raise ValueError(f"column {column!r} is {values.type}, but encoding ids needs integers; {hint}")
        ids = values.to_numpy()
        if ids.dtype == np.uint64 and len(ids) and int(ids.max()) > np.iinfo(np.int64).max:
            raise ValueError(
                f"column {column!r}: id {int(ids.max())} does not fit in 64 bits with a sign; hash the column"
            )
        return ids if ids.dtype in (np.int32, np.int64) else ids.astype(np.int64)
    if feature.encoding == "hash":
        try:
            hashed = hash_array(values, seed)
        except TypeError as error:
            raise ValueError(f"column {column!r}: {error}; only strings and integers can be hashed") from error
        return (hashed % np.uint64(feature.num_embeddings)).astype(np.int64)
    assert vocabulary is not None
    try:
        return vocabulary.rows(values)
    except pa.ArrowException as error:
        raise ValueError(f"column {column!r} is {values.type}, but its vocabulary holds {vocabulary.type}") from error


def bags(
    table: pa.Table, name: str, feature: SparseColumn, vocabulary: VocabularyRows | None, seed: int, source: Source
) -> Bags:
    """The ids of one feature in a row group.

    Raises:
        ValueError: the column's type does not fit the encoding, or the weights do not fit the ids.
    """
    column = feature.column or name
    array = one_array(table[column])
    values, offsets = _flatten(array, keep_null_lists=feature.nulls != "skip")
    weights = None
    if feature.weights is not None:
        weights = _id_weights(one_array(table[feature.weights]), feature, column, array, source)
    try:
        if not values.null_count:
            return Bags(_encode(values, column, feature, vocabulary, seed), offsets, weights)
        encoded = _encode(values.drop_null(), column, feature, vocabulary, seed)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    if feature.nulls != "skip":
        filled = np.full(len(values), feature.nulls, np.int64)
        filled[valid] = encoded
        return Bags(filled, offsets, weights)
    kept = np.concatenate([[0], np.cumsum(valid)]).astype(np.int64)
    return Bags(encoded, kept if offsets is None else kept[offsets], None if weights is None else weights[valid])


def _id_weights(array: pa.Array, feature: SparseColumn, column: str, ids: pa.Array, source: Source) -> np.ndarray:
    """A weight for each id, float32 ``[ids]``; a null that stands for a row has the weight 1."""
    values, offsets = _flatten(array, keep_null_lists=False)
    if is_list(array.type) != is_list(ids.type):
        raise ValueError(
            f"{source.path}: weights column {feature.weights!r} is {array.type}, but its ids {column!r} are "
            f"{ids.type}; both must be lists, or neither"
        )
    flat_ids, id_offsets = _flatten(ids, keep_null_lists=False)
    if offsets is not None and id_offsets is not None:
        lengths, wanted = np.diff(offsets), np.diff(id_offsets)
        different = np.flatnonzero(lengths != wanted)
        if different.size:
            row = int(different[0])
            raise ValueError(
                f"weights column {feature.weights!r}: {lengths[row]} weights for {wanted[row]} ids of column "
                f"{column!r} in {source.where(row)}"
            )
    numbers = _numeric(values, str(feature.weights), "the weight of an id", source)
    filled = pc.if_else(flat_ids.is_null(), pc.fill_null(numbers, 1), numbers)
    weights = filled.to_numpy(zero_copy_only=False).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(weights))
    if wrong.size:
        at = int(wrong[0])
        row = at if id_offsets is None else int(np.searchsorted(id_offsets, at, side="right")) - 1
        raise ValueError(
            f"weights column {feature.weights!r}: {values[at]} in {source.where(row)}; it must hold one finite number "
            "for each id"
        )
    if id_offsets is not None and feature.nulls != "skip":
        null_lists = ids.is_null().to_numpy(zero_copy_only=False)
        weights = np.insert(weights, id_offsets[:-1][null_lists], np.float32(1))
    return weights
