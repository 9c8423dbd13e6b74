"""The hash that maps strings and integers to rows, and rows to parts of a split.

A string is hashed over its UTF-8 bytes by 64-bit FNV-1a (Fowler, Noll and Vo), an integer stands for itself; both
then pass SplitMix64's output function (Steele, Lea and Flood, 2014) together with the seed. The row is the result
modulo the number of rows. The same value and seed give the same row on every machine.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_offload.data.arrays import one_array
from recsys_offload.splitmix64 import GOLDEN_GAMMA, mix

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)


@numba.njit(nogil=True, cache=True)
def _seeded(value: np.uint64, seed: np.uint64) -> np.uint64:
    return mix(value ^ ((seed + np.uint64(1)) * GOLDEN_GAMMA))


@numba.njit(nogil=True, cache=True)
def _hash_bytes(offsets: Any, data: Any, seed: np.uint64, output: Any) -> None:
    for index in range(len(output)):
        bits = FNV_OFFSET
        for position in range(offsets[index], offsets[index + 1]):
            bits = (bits ^ np.uint64(data[position])) * FNV_PRIME
        output[index] = _seeded(bits, seed)


@numba.njit(nogil=True, cache=True)
def hash_integers(values: Any, seed: np.uint64, output: Any) -> None:
    """Hashes int64 ``values`` into uint64 ``output``."""
    for index in range(len(output)):
        output[index] = _seeded(np.uint64(values[index]), seed)


def hash_array(values: pa.Array, seed: int) -> np.ndarray:
    """Hashes an array of strings, binary or integers without nulls.

    Returns:
        uint64, one per value.

    Raises:
        TypeError: the values are of another type.
    """
    if pa.types.is_dictionary(values.type):
        return hash_array(values.dictionary, seed)[values.indices.to_numpy(zero_copy_only=False)]
    output = np.empty(len(values), np.uint64)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if not pa.types.is_uint64(kind):
            values = values.cast(pa.int64())
        hash_integers(values.to_numpy(zero_copy_only=False).view(np.int64), np.uint64(seed), output)
        return output
    if (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        offsets, data = utf8_bytes(values)
        _hash_bytes(offsets, data, np.uint64(seed), output)
        return output
    raise TypeError(f"cannot hash values of type {kind}")


def utf8_bytes(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Of strings or binary: where each begins, int64 ``[values + 1]``, and the bytes of all, uint8."""
    binary = values.cast(pa.large_binary())
    _, offset_buffer, data_buffer = binary.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[binary.offset : binary.offset + len(binary) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return offsets, data


def hash_rows(table: pa.Table, columns: list[str], seed: int) -> np.ndarray:
    """Hashes the values of several columns together, uint64 ``[rows]``; a null counts as a value of its own.

    Raises:
        TypeError: a column holds neither strings nor integers.
    """
    combined = np.zeros(table.num_rows, np.uint64)
    for number, name in enumerate(columns):
        column = one_array(table[name])
        valid = np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False), bool)
        hashed = np.zeros(table.num_rows, np.uint64)
        try:
            hashed[valid] = hash_array(column.drop_null(), seed)
        except TypeError as error:
            raise TypeError(f"column {name!r}: {error}") from error
        mixed = np.empty_like(combined)
        hash_integers((combined ^ hashed).view(np.int64), np.uint64(seed + number), mixed)
        combined = mixed
    return combined
