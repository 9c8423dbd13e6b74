"""From the values of a vocabulary to their rows: a hash table that is built once, not for every row group."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pyarrow as pa

from recsys_offload.data.hashing import hash_array, utf8_bytes

EMPTY = -1


@numba.njit(nogil=True, cache=True)
def _fill(hashes: Any, slots: Any) -> None:
    """Puts each value into the first free slot from its hash on; ``slots`` has a power of two of them."""
    last = np.uint64(len(slots) - 1)
    for index in range(len(hashes)):
        slot = hashes[index] & last
        while slots[slot] != EMPTY:
            slot = (slot + np.uint64(1)) & last
        slots[slot] = index


@numba.njit(nogil=True, cache=True)
def _same_bytes(offsets: Any, data: Any, index: int, other_offsets: Any, other_data: Any, other: int) -> bool:
    first, other_first = offsets[index], other_offsets[other]
    size = offsets[index + 1] - first
    if other_offsets[other + 1] - other_first != size:
        return False
    for position in range(size):  # noqa: SIM110 - for Numba
        if data[first + position] != other_data[other_first + position]:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def _find(
    hashes: Any,
    offsets: Any,
    data: Any,
    known_hashes: Any,
    known_offsets: Any,
    known_data: Any,
    slots: Any,
    output: Any,
) -> None:
    """Writes each value's place in the vocabulary plus one, or 0.

    Strings with the same hash are compared; integers (empty ``known_offsets``) have the same hash only if they are
    the same.
    """
    last = np.uint64(len(slots) - 1)
    strings = len(known_offsets) > 0
    for index in range(len(hashes)):
        output[index] = 0
        slot = hashes[index] & last
        while slots[slot] != EMPTY:
            known = slots[slot]
            if hashes[index] == known_hashes[known] and (
                not strings or _same_bytes(offsets, data, index, known_offsets, known_data, known)
            ):
                output[index] = known + 1
                break
            slot = (slot + np.uint64(1)) & last


def _content(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and bytes of strings; both empty for integers."""
    if pa.types.is_integer(values.type):
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    return utf8_bytes(values)


class VocabularyRows:
    """Looks values up in a vocabulary: value i is row i + 1, all others are row 0."""

    def __init__(self, vocabulary: pa.Array) -> None:
        """Args:
        vocabulary: distinct strings or integers, without nulls.
        """
        self.type: pa.DataType = vocabulary.type
        self._hashes = hash_array(vocabulary, 0)
        self._offsets, self._data = _content(vocabulary)
        # At most half full, so that few slots are tried.
        self._slots = np.full(1 << (2 * len(vocabulary)).bit_length(), EMPTY, np.int64)
        _fill(self._hashes, self._slots)

    def rows(self, values: pa.Array) -> np.ndarray:
        """The row of each value, int64.

        Raises:
            pyarrow.ArrowException: the values are of a type that cannot be turned into the vocabulary's.
        """
        if pa.types.is_dictionary(values.type):
            return self.rows(values.dictionary)[values.indices.to_numpy(zero_copy_only=False)]
        values = values.cast(self.type)
        output = np.empty(len(values), np.int64)
        offsets, data = _content(values)
        known = (self._hashes, self._offsets, self._data)
        _find(hash_array(values, 0), offsets, data, *known, self._slots, output)
        return output
