"""The shape of the Criteo click logs: column names, numbers of distinct ids, ids per example."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LABEL = "label"
DENSE_COLUMNS = 13
SPARSE_COLUMNS = 26
# TorchRec's names for the columns.
DENSE_NAMES = tuple(f"int_{index}" for index in range(DENSE_COLUMNS))
SPARSE_NAMES = tuple(f"cat_{index}" for index in range(SPARSE_COLUMNS))

# A column with so few ids is kept whole when a schema is scaled down: its size does not matter, its meaning does.
KEPT_WHOLE = 1000

# fmt: off
_KAGGLE_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# As MLPerf's DCNv2 reads Criteo 1TB.
_TERABYTE_CARDINALITIES = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)
_TERABYTE_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on


@dataclass(frozen=True)
class Schema:
    """The categorical columns of a click log.

    Attributes:
        cardinalities: for each column, how many distinct ids it has; ids are 0 to that minus one.
        hotness: for each column, ids per example. A column with one id is an integer column, others are lists.
    """

    cardinalities: tuple[int, ...]
    hotness: tuple[int, ...]

    def scaled(self, factor: float) -> Schema:
        """The schema with ``factor`` times the ids; columns of up to `KEPT_WHOLE` ids do not shrink.

        Raises:
            ValueError: the factor is not a positive number.
        """
        if not 0.0 < factor < math.inf:
            raise ValueError(f"scale must be a positive number, not {factor}")
        sizes = (max(min(size, KEPT_WHOLE), round(size * factor)) for size in self.cardinalities)
        return replace(self, cardinalities=tuple(sizes))


SCHEMAS = {
    "criteo-kaggle": Schema(_KAGGLE_CARDINALITIES, (1,) * SPARSE_COLUMNS),
    "criteo-1tb-multihot": Schema(_TERABYTE_CARDINALITIES, _TERABYTE_HOTNESS),
}
