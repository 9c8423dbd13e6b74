"""The directory of tables that are on the device as a whole, beside what a `Directory` promises."""

from __future__ import annotations

import numpy as np
import pytest

from recsys_offload.embedding.directory import Admission, Directory
from recsys_offload.embedding.resident import ResidentDirectory


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def test_every_row_has_the_slot_of_its_own_number_and_nothing_moves() -> None:
    directory = ResidentDirectory(10)
    assert directory.slots == directory.residents == 10
    for number, rows in enumerate([array(7, 2, 9), array(), array(2)]):
        admission = directory.admit(rows, number, number, [(number + 1, array(3))])
        assert isinstance(admission, Admission)
        assert admission.slots.dtype == np.int32 and admission.slots.tolist() == rows.tolist()
        for part, dtype in [
            (admission.fetch, np.int32),
            (admission.write_back_rows, np.int64),
            (admission.write_back_slots, np.int64),
        ]:
            assert part.dtype == dtype and part.size == 0
        assert admission.newest_use == -1
    assert directory.residents == 10


def test_no_batch_keeps_slots_from_another() -> None:
    directory = ResidentDirectory(4)
    everything = np.arange(4)
    for number in range(3):
        directory.admit(everything, number, 0)
        assert directory.held(0) == 0


def test_rows_are_found_before_any_batch_and_finding_them_changes_nothing() -> None:
    directory = ResidentDirectory(4)
    found = directory.find(array(3, 0, 3))
    assert found.dtype == np.int32 and found.tolist() == [3, 0, 3]
    assert [part.tolist() for part in directory.flush(0)] == [[], []]


def test_a_flush_has_the_rows_that_were_used_since_the_last_one() -> None:
    directory = ResidentDirectory(9)
    directory.admit(array(8, 1), 0, 0)
    directory.admit(array(1, 4), 1, 1)
    rows, slots = directory.flush(2)
    assert rows.tolist() == slots.tolist() == [1, 4, 8]
    assert directory.flush(2)[0].tolist() == []
    directory.admit(array(4), 2, 2)
    assert [part.tolist() for part in directory.flush(3)] == [[4], [4]]


def test_a_row_in_use_during_a_flush_counts_as_changed_afterwards() -> None:
    directory = ResidentDirectory(9)
    directory.admit(array(0, 1), 0, 0)
    directory.admit(array(1), 1, 0)
    assert {0, 1} <= set(directory.flush(1)[0].tolist())  # batch 1 has not finished: its update is still to come
    assert directory.flush(2)[0].tolist() == [1]
    assert directory.flush(2)[0].tolist() == []


def test_a_directory_that_has_forgotten_wants_every_row_again() -> None:
    directory = ResidentDirectory(5)
    directory.admit(array(3), 0, 0)
    assert directory.forget().tolist() == [0, 1, 2, 3, 4]
    assert directory.find(array(3, 4)).tolist() == [3, 4]
    directory.admit(array(2), 1, 1)
    assert 2 in directory.flush(2)[0]


@pytest.mark.parametrize("directory", [Directory(5, 5), ResidentDirectory(5)], ids=["cached", "resident"])
def test_what_was_changed_before_new_values_came_is_not_written_over_them(
    directory: Directory | ResidentDirectory,
) -> None:
    directory.admit(array(3), 0, 0)
    directory.forget()
    assert directory.flush(1)[0].tolist() == []


def test_it_never_grows() -> None:
    with pytest.raises(AssertionError, match="a resident table needs no more slots"):
        ResidentDirectory(5).grow(6)
