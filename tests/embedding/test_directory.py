import numpy as np
import pytest

from recsys_offload.embedding.directory import Admission, Directory


@pytest.mark.parametrize("empty", [1, 3, 400_000])
def test_batches_without_rows_may_come_first(empty: int) -> None:
    directory = Directory(rows=10, slots=4)
    nothing = np.empty(0, np.int64)
    for number in (0, empty - 1):
        assert isinstance(directory.admit(nothing, number, number), Admission)
    admission = directory.admit(np.array([7, 3]), empty, empty)
    assert isinstance(admission, Admission) and admission.fetch.tolist() == [0, 1]
    assert directory.find(np.array([3, 7, 5])).tolist() == [*admission.slots[[1, 0]], -1]
