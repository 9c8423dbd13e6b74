"""A click log with planted effects, as a function of a few numbers: any of its rows can be made at any time."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from recsys_offload.data.criteo import DENSE_COLUMNS, DENSE_NAMES, LABEL, SPARSE_COLUMNS, SPARSE_NAMES, Schema
from recsys_offload.data.synthetic_kernels import draw_labels, fill_counts, fill_ids, mix

BASE_RATE = 0.25
# The strength of the planted effects, in standard deviations of the logit. Together they give an AUC near Criteo's 0.8.
DENSE_STRENGTH, SPARSE_STRENGTH, PAIR_STRENGTH = 0.5, 1.1, 0.6
PAIRS = 8
CALIBRATION_ROWS = 32768
CALIBRATION_FIRST_ROW = 1 << 62
LABEL_KEY, FIRST_COLUMN_KEY = 0, 1
PROBABILITY_BINS = 1 << 16


@dataclass(frozen=True)
class Column:
    """One generated column and what it adds to the click model (float32 ``[rows]`` each; dense columns: no factor)."""

    values: pa.Array
    effect: np.ndarray
    factor: np.ndarray | None = None


@dataclass(frozen=True)
class ClickLog:
    """A click log that is fully determined by these values: whichever part is made, in whichever pieces, is the same.

    Attributes:
        schema: of the categorical columns.
        skew: the exponent of the Zipf law of the ids; 0 is uniform.
        null_rate: the share of nulls, in dense and categorical columns alike.
        scatter_ids: whether frequent ids lie anywhere in a table, rather than at its start.
        seed: of everything.

    Raises:
        ValueError: a value is out of range.
    """

    schema: Schema
    skew: float = 1.05
    null_rate: float = 0.05
    scatter_ids: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.skew <= 10.0:
            raise ValueError(f"skew must be between 0 and 10, not {self.skew}")
        if not 0.0 <= self.null_rate <= 1.0:
            raise ValueError(f"null_rate must be between 0 and 1, not {self.null_rate}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2^63 - 1, not {self.seed}")
        for size in self.schema.cardinalities:
            if not 1 <= size < 2**31:
                raise ValueError(f"a column has between 1 and 2^31 - 1 distinct ids, not {size}")

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns: label int8, dense int32, categorical int32 or lists of int32."""
        sparse = (pa.int32() if hotness == 1 else pa.list_(pa.int32()) for hotness in self.schema.hotness)
        fields = [(LABEL, pa.int8()), *((name, pa.int32()) for name in DENSE_NAMES)]
        return pa.schema([*fields, *zip(SPARSE_NAMES, sparse, strict=True)])

    def start(self, pool: ThreadPoolExecutor, first_row: int, rows: int) -> list[Future[Column]]:
        """Begins to make all columns of some rows; `finish` takes the result."""
        dense = [pool.submit(self._dense_column, index, first_row, rows) for index in range(DENSE_COLUMNS)]
        sparse = [pool.submit(self._sparse_column, index, first_row, rows) for index in range(SPARSE_COLUMNS)]
        return dense + sparse

    def finish(self, pending: list[Future[Column]], first_row: int) -> tuple[pa.RecordBatch, np.ndarray]:
        """The rows that `start` was asked for, and for each its true probability of a click (float64)."""
        columns = [future.result() for future in pending]
        logit = self._logit(columns)
        probability, labels = np.empty(len(logit)), np.empty(len(logit), np.int8)
        draw_labels(self._key(LABEL_KEY), first_row, logit, self._intercept, probability, labels)
        arrays = [pa.array(labels), *(column.values for column in columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema), probability

    def _key(self, number: int) -> np.uint64:
        return np.uint64(mix(np.uint64(mix(np.uint64(self.seed))) + np.uint64(number)))

    def _dense_column(self, index: int, first_row: int, rows: int) -> Column:
        random = np.random.default_rng([self.seed, index])
        location, spread = random.uniform(0.5, 4.0), random.uniform(0.8, 2.0)
        counts, is_null = np.empty(rows, np.int32), np.empty(rows, np.bool_)
        effect = np.empty(rows, np.float32)
        key = self._key(FIRST_COLUMN_KEY + index)
        fill_counts(key, first_row, location, spread, self.null_rate, counts, is_null, effect)
        return Column(pa.array(counts, mask=is_null), effect)

    def _sparse_column(self, index: int, first_row: int, rows: int) -> Column:
        size, hotness = self.schema.cardinalities[index], self.schema.hotness[index]
        ids, is_null = np.empty(rows * hotness, np.int32), np.empty(rows, np.bool_)
        effect, factor = np.empty(rows, np.float32), np.empty(rows, np.float32)
        multiplier, offset = self._scatter(index) if self.scatter_ids else (1, 0)
        written = fill_ids(
            self._key(FIRST_COLUMN_KEY + DENSE_COLUMNS + index), first_row, rows, size, hotness, self.skew,
            self.null_rate, multiplier, offset, ids, is_null, effect, factor,
        )  # fmt: skip
        if hotness == 1:
            return Column(pa.array(ids, mask=is_null), effect, factor)
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(np.where(is_null, 0, hotness), out=offsets[1:])
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids[:written]), mask=pa.array(is_null))
        return Column(lists, effect, factor)

    def _scatter(self, index: int) -> tuple[int, int]:
        """Multiplier and offset of a bijection of a table's ids that takes neighbours far apart."""
        size = self.schema.cardinalities[index]
        multiplier = max(1, round(size * (math.sqrt(5.0) - 1.0) / 2.0))
        while math.gcd(multiplier, size) != 1:
            multiplier += 1
        return multiplier, int(np.random.default_rng([self.seed, DENSE_COLUMNS + index]).integers(size))

    @cached_property
    def _weights(self) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
        """The weight of each column's effect, the pairs of columns that interact, and the weight of each pair."""
        random = np.random.default_rng([self.seed, DENSE_COLUMNS + SPARSE_COLUMNS])

        def with_norm(count: int, norm: float) -> np.ndarray:
            weights = random.uniform(0.5, 1.5, count) * random.choice([-1.0, 1.0], count)
            return weights * (norm / np.linalg.norm(weights))

        columns = np.concatenate([with_norm(DENSE_COLUMNS, DENSE_STRENGTH), with_norm(SPARSE_COLUMNS, SPARSE_STRENGTH)])
        members = DENSE_COLUMNS + random.permutation(SPARSE_COLUMNS)[: 2 * PAIRS].reshape(PAIRS, 2)
        return columns, [(int(one), int(other)) for one, other in members], with_norm(PAIRS, PAIR_STRENGTH)

    def _logit(self, columns: list[Column]) -> np.ndarray:
        """The log-odds of a click, float64 ``[rows]``, but for the intercept."""
        column_weights, pairs, pair_weights = self._weights
        logit = np.zeros(len(columns[0].effect))
        for column, weight in zip(columns, column_weights, strict=True):
            logit += weight * column.effect
        for (one, other), weight in zip(pairs, pair_weights, strict=True):
            one_factor, other_factor = columns[one].factor, columns[other].factor
            assert one_factor is not None and other_factor is not None
            logit += weight * one_factor * other_factor
        return logit

    @cached_property
    def _intercept(self) -> float:
        """The intercept that makes the share of clicks `BASE_RATE`, found on rows that are in no data set."""
        with ThreadPoolExecutor(1) as pool:
            pending = self.start(pool, CALIBRATION_FIRST_ROW, CALIBRATION_ROWS)
        logit = self._logit([future.result() for future in pending])
        low, high = -20.0, 20.0
        while high - low > 1e-9:
            middle = 0.5 * (low + high)
            too_low = float(np.mean(1.0 / (1.0 + np.exp(-(logit + middle))))) < BASE_RATE
            low, high = (middle, high) if too_low else (low, middle)
        return low


class OptimalModel:
    """The AUC of the true probabilities, over a stream of rows, in a fixed amount of memory."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, PROBABILITY_BINS), np.int64)

    def add(self, probability: np.ndarray, labels: np.ndarray) -> None:
        """Takes rows in: float64 and int8 ``[rows]``."""
        bins = np.minimum((probability * PROBABILITY_BINS).astype(np.int64), PROBABILITY_BINS - 1)
        for label in (0, 1):
            self._counts[label] += np.bincount(bins[labels == label], minlength=PROBABILITY_BINS)

    @property
    def base_rate(self) -> float:
        return float(self._counts[1].sum() / self._counts.sum())

    @property
    def auc(self) -> float | None:
        """None where all labels are the same."""
        negatives, positives = self._counts
        if not negatives.sum() or not positives.sum():
            return None
        below = np.cumsum(negatives) - 0.5 * negatives
        return float((positives * below).sum() / (positives.sum() * negatives.sum()))
