"""The directory of tables that are on the device as a whole: every row has the slot of its own number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recsys_offload.embedding.directory import Admission

_NOTHING = np.empty(0, np.int64)


class ResidentDirectory:
    """Stands where a ``Directory`` does; it never fetches, and never runs out of slots."""

    def __init__(self, rows: int) -> None:
        """Args:
        rows: of all tables of the group.
        """
        self._last_use = np.full(rows, -1, np.int32)
        self._flushed = -1

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._last_use)

    residents = slots

    def held(self, oldest: int) -> int:
        """How many slots unfinished batches keep from others: none, since no row wants another's."""
        return 0

    def admit(
        self, rows: np.ndarray, number: int, oldest: int, coming: Sequence[tuple[int, np.ndarray]] = ()
    ) -> Admission:
        """The slots of a batch's rows."""
        self._last_use[rows] = number
        return Admission(rows.astype(np.int32), np.empty(0, np.int32), _NOTHING, _NOTHING, -1)

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The slots of ``rows``, int32 ``[n]``."""
        return rows.astype(np.int32)

    def flush(self, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """As ``Directory.flush``."""
        changed = np.flatnonzero(self._last_use > self._flushed)
        self._flushed = oldest - 1
        return changed, changed

    def forget(self) -> np.ndarray:
        """As ``Directory.forget``; all rows are to be fetched."""
        self._last_use.fill(-1)
        return np.arange(self.slots)

    def grow(self, slots: int) -> None:
        """Never called: there is a slot for every row."""
        raise AssertionError("a resident table needs no more slots")
