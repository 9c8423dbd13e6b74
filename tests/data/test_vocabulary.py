"""Values are found in a vocabulary exactly, and others are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_offload.data import vocabulary as vocabulary_module
from recsys_offload.data.vocabulary import VocabularyRows

WORDS = st.lists(st.text(max_size=4), max_size=40)
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), max_size=40)


@given(st.tuples(WORDS, WORDS) | st.tuples(NUMBERS, NUMBERS), st.booleans())
def test_rows_are_places_in_the_vocabulary(lists: tuple[list[Any], list[Any]], encoded: bool) -> None:
    known, values = list(dict.fromkeys(lists[0])), lists[0][::2] + lists[1]
    kind = pa.string() if any(isinstance(value, str) for value in known + values) else pa.int64()
    array = pa.array(values, kind)
    found = VocabularyRows(pa.array(known, kind)).rows(array.dictionary_encode() if encoded else array)
    assert found.tolist() == [known.index(value) + 1 if value in known else 0 for value in values]


def test_strings_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_module, "hash_array", lambda values, seed: np.full(len(values), 6, np.uint64))
    rows = VocabularyRows(pa.array(["", "a", "b", "ab", "ba"]))
    assert rows.rows(pa.array(["ba", "ab", "b", "a", "", "c", "bb", "abc"])).tolist() == [5, 4, 3, 2, 1, 0, 0, 0]


def test_types_of_values_may_differ_in_width() -> None:
    assert VocabularyRows(pa.array([3, 1], pa.int64())).rows(pa.array([1, 2, 3], pa.uint8())).tolist() == [2, 0, 1]
    words = VocabularyRows(pa.array(["x", "y"], pa.large_string())).rows(pa.array(["z", "y", "x"])[1:])
    assert words.tolist() == [2, 1]
    with pytest.raises(pa.ArrowInvalid):
        VocabularyRows(pa.array([3, 1])).rows(pa.array(["three"]))
