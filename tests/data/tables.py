"""Small Parquet files for the tests, and what their batches must hold, found row by row in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys_offload.data import Batch, DataSettings, Encoding, ParquetBatches
from recsys_offload.data.config import HashSplit

MASK = 2**64 - 1


def write_files(folder: Path, table: pa.Table, sizes: Iterable[int], row_group_rows: int) -> list[str]:
    """Cuts a table into files of these sizes."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"part-{number:02}.parquet"
        pq.write_table(table.slice(first, size), path, row_group_size=row_group_rows)
        paths.append(str(path))
        first += size
    return paths


def hash_in_python(value: str | int, seed: int) -> int:
    """The documented hash: FNV-1a over a string's bytes, an integer as it is, then SplitMix64's output function."""
    if isinstance(value, str):
        bits = 0xCBF29CE484222325
        for byte in value.encode():
            bits = ((bits ^ byte) * 0x100000001B3) & MASK
    else:
        bits = value & MASK
    bits ^= ((seed + 1) * 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def part_in_python(row: int, split: HashSplit) -> str:
    """The part of a row that is split by its number."""
    uniform = (hash_in_python(row, split.seed) >> 11) * 2.0**-53
    if uniform < split.shares.train:
        return "train"
    return "validation" if uniform < split.shares.train + split.shares.validation else "test"


@dataclass
class Row:
    """What one row becomes."""

    dense: list[float]
    ids: list[list[int]]
    weights: list[list[float]]
    label: float
    sample_weight: float


def _dense(value: Any, transform: str, fill: float, moments: tuple[float, float]) -> float:
    if value is None or math.isnan(value):
        return float(np.float32(fill))
    value = float(value)
    if transform == "log1p":
        value = math.copysign(math.log1p(abs(value)), value)
    elif transform == "standardize":
        value = (value - moments[0]) * (1.0 / moments[1])
    return float(np.float32(value))


def expected_rows(table: pa.Table, settings: DataSettings, encoding: Encoding) -> list[Row]:
    """Every row of the table, converted the slow way."""
    rows = []
    vocabularies = {name: values.to_pylist() for name, values in encoding.vocabularies.items()}
    for record in table.to_pylist():
        dense = [
            _dense(record[name], feature.transform, feature.fill, encoding.moments.get(name, (0.0, 1.0)))
            for name, feature in settings.dense.items()
        ]
        ids: list[list[int]] = []
        weights: list[list[float]] = []
        for name, feature in settings.sparse.items():
            value = record[feature.column or name]
            values = value if isinstance(value, list) else [value]
            value_weights = record[feature.weights] if feature.weights else None
            value_weights = value_weights if isinstance(value_weights, list) else [value_weights] * len(values)
            bag, bag_weights = [], []
            for item, weight in zip(values, value_weights, strict=True):
                if item is None:
                    if feature.nulls == "skip":
                        continue
                    encoded = feature.nulls
                elif feature.encoding == "hash":
                    encoded = hash_in_python(item, settings.hash_seed) % feature.num_embeddings
                elif feature.encoding == "vocabulary":
                    known = vocabularies[name]
                    encoded = known.index(item) + 1 if item in known else 0
                else:
                    encoded = item
                bag.append(int(encoded))
                bag_weights.append(1.0 if weight is None else float(np.float32(weight)))
            ids.append(bag)
            weights.append(bag_weights)
        rows.append(Row(dense, ids, weights, float(record[settings.label]), float(record.get("sample_weight") or 0)))
    return rows


def rows_of(batches: Iterable[Batch]) -> Iterator[Row]:
    """The rows of batches; checks that lengths, offsets and values of the ids agree."""
    for batch in batches:
        size = len(batch)
        ids = batch.sparse
        offsets, values = ids.offsets(), ids.values()
        assert values.dtype == torch.int64 and batch.dense.dtype == torch.float32
        assert ids.stride() == size and len(batch.labels) == size
        assert torch.equal(offsets.diff(), ids.lengths()) and offsets[0] == 0 and offsets[-1] == len(values)
        id_weights = ids.weights_or_none()
        for row in range(size):
            bags = [
                values[offsets[k * size + row] : offsets[k * size + row + 1]].tolist() for k in range(len(ids.keys()))
            ]
            bag_weights = [[1.0] * len(bag) for bag in bags]
            if id_weights is not None:
                bag_weights = [
                    id_weights[offsets[k * size + row] : offsets[k * size + row + 1]].tolist()
                    for k in range(len(ids.keys()))
                ]
            weight = 0.0 if batch.weights is None else batch.weights[row].item()
            yield Row(batch.dense[row].tolist(), bags, bag_weights, batch.labels[row].item(), weight)


def open_batches(settings: DataSettings, part: str = "all", batch_size: int = 7, **options: Any) -> ParquetBatches:
    """Batches after a fresh fit."""
    return ParquetBatches(settings, Encoding.fit(settings), part, batch_size, **options)
