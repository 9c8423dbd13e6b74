"""Numba kernels that plan a batch: the distinct rows of each table, and where in the batch each occurs."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_offload.embedding.kernels.host_lookup import valid_id
from recsys_offload.embedding.kernels.layout import BASE, COLUMN, KEY, MEAN, SIZE
from recsys_offload.embedding.kernels.numba_support import kernel, prefetch_write

PREFETCH_DISTANCE = 48


@kernel
def rises(offsets: Any) -> bool:
    """Whether no offset is below the one before it."""
    falls = 0
    for index in range(1, offsets.shape[0]):
        falls += offsets[index] < offsets[index - 1]
    return falls == 0


@kernel
def _number_rows(
    table: int,
    features: Any,
    table_starts: Any,
    feature_ids: Any,
    values: Any,
    offsets: Any,
    batch_size: int,
    policy: int,
    fallback: int,
    last_number: Any,
    rows: Any,
    counts: Any,
    inverse: Any,
) -> int:
    """Numbers the distinct rows of one table as they first occur, in one pass without a sort.

    ``last_number[row]`` is the number that a row had when it last occurred. It is believed only if the list of this
    batch's rows agrees, so it is never cleared (the sparse set of Briggs and Torczon, 1993).

    Returns how many rows there are, or -1 - p where position p of ``values`` holds an invalid id.
    """
    first = feature_ids[table_starts[table]]
    distinct = 0
    for feature in range(table_starts[table], table_starts[table + 1]):
        first_bag = features[feature, KEY] * batch_size
        begin, end = offsets[first_bag], offsets[first_bag + batch_size]
        base, size = features[feature, BASE], features[feature, SIZE]
        shift = feature_ids[feature] - begin
        for position in range(begin, end):
            if position + PREFETCH_DISTANCE < end:
                ahead = values[position + PREFETCH_DISTANCE]
                if 0 <= ahead < size:
                    prefetch_write(last_number, base + ahead)
            id_ = valid_id(values[position], size, policy, fallback)
            if id_ < 0:
                return -1 - position
            row = base + id_
            number = last_number[row]
            if number >= distinct or rows[first + number] != row:
                number = distinct
                last_number[row] = number
                rows[first + number] = row
                counts[first + number] = 0
                distinct += 1
            counts[first + number] += 1
            inverse[position + shift] = number
    return distinct


@kernel
def plan_tables(
    first_table: int,
    last_table: int,
    features: Any,
    table_starts: Any,
    feature_ids: Any,
    values: Any,
    offsets: Any,
    weights: Any,
    batch_size: int,
    pooled: bool,
    policy: int,
    fallback: int,
    last_number: Any,
    rows: Any,
    starts: Any,
    inverse: Any,
    order: Any,
    gradient_rows: Any,
    gradient_columns: Any,
    factors: Any,
    distinct: Any,
) -> int:
    """Plans tables ``[first_table, last_table)``; each writes its own part of the outputs.

    Ids are numbered feature by feature: those of feature f are ``feature_ids[f]`` to ``feature_ids[f + 1]``. A table's
    part of ``rows`` and ``starts`` begins at the number of its first id, which leaves gaps between the tables.
    Where ``pooled``, an id's gradient lies in the output's row of its sample, else in a row of its own.

    Returns -1, or the position of an invalid id.
    """
    for table in range(first_table, last_table):
        number = _number_rows(
            table,
            features,
            table_starts,
            feature_ids,
            values,
            offsets,
            batch_size,
            policy,
            fallback,
            last_number,
            rows,
            starts,
            inverse,
        )
        if number < 0:
            return -1 - number
        distinct[table] = number
        first = feature_ids[table_starts[table]]
        total = first
        for index in range(first, first + number):
            count = starts[index]
            starts[index] = total
            total += count
        # Placing an id moves its row's start on; when all are placed, each start is where the next row's began.
        for feature in range(table_starts[table], table_starts[table + 1]):
            first_bag = features[feature, KEY] * batch_size
            shift = feature_ids[feature] - offsets[first_bag]
            column = features[feature, COLUMN]
            for sample in range(batch_size):
                begin, end = offsets[first_bag + sample], offsets[first_bag + sample + 1]
                for position in range(begin, end):
                    slot = first + inverse[position + shift]
                    place = starts[slot]
                    starts[slot] = place + 1
                    order[place] = position + shift
                    gradient_rows[place] = sample if pooled else position + shift
                    gradient_columns[place] = column if pooled else 0
                    if factors.shape[0] > 0:
                        factor = weights[position] if weights.shape[0] > 0 else np.float32(1)
                        if features[feature, MEAN]:
                            factor = factor / np.float32(end - begin)
                        factors[place] = factor
    return -1


@kernel
def compact_tables(
    first_table: int,
    last_table: int,
    table_starts: Any,
    feature_ids: Any,
    first_distinct: Any,
    gapped_rows: Any,
    gapped_starts: Any,
    rows: Any,
    starts: Any,
    inverse: Any,
) -> None:
    """Moves each table's rows to their place in the group's list, and renumbers ``inverse`` to match."""
    for table in range(first_table, last_table):
        first = feature_ids[table_starts[table]]
        shift = first_distinct[table]
        begin = first
        for index in range(first_distinct[table + 1] - shift):
            rows[shift + index] = gapped_rows[first + index]
            starts[shift + index] = begin
            begin = gapped_starts[first + index]
        for index in range(first, feature_ids[table_starts[table + 1]]):
            inverse[index] += shift
