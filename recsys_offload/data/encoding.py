"""What is learned from the training part before training: means, vocabularies, boundaries and sizes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_offload.data.config import PARTS, DataSettings, TimeSplit
from recsys_offload.data.convert import dense_values, flat_ids
from recsys_offload.data.files import FileSet, RowGroup, open_files, read_row_group
from recsys_offload.data.split import TRAIN, as_number, boundary, parts_of_rows, split_columns

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class Encoding:
    """How columns become numbers, beyond what the settings say.

    Attributes:
        moments: standardized dense feature -> (mean, standard deviation).
        vocabularies: feature -> its values; value i is row i + 1.
        times: first time of the validation and of the test part, for a split by time.
        rows: part -> its number of rows, for the parts that there are.
    """

    moments: dict[str, tuple[float, float]]
    vocabularies: dict[str, pa.Array]
    times: tuple[float, float] | None
    rows: dict[str, int]

    @classmethod
    def fit(cls, settings: DataSettings) -> Encoding:
        """Learns from the training part, reading only the columns that it must.

        Raises:
            FileNotFoundError: a path stands for no file.
            ValueError: a file or column is not as the settings say.
        """
        files = open_files(settings.train, wanted_columns(settings))
        times = _times(settings, files)
        standardized = [name for name, feature in settings.dense.items() if feature.transform == "standardize"]
        with_vocabulary = [name for name, feature in settings.sparse.items() if feature.encoding == "vocabulary"]
        columns = [settings.dense[name].column or name for name in standardized]
        columns += [settings.sparse[name].column or name for name in with_vocabulary]
        if settings.split is not None:
            columns += split_columns(settings.split)
        totals = {name: np.zeros(3) for name in standardized}
        counts: dict[str, list[pa.StructArray]] = {name: [] for name in with_vocabulary}
        sizes = np.zeros(4, np.int64)
        for group, table in _read(files, list(dict.fromkeys(columns))):
            if settings.split is not None:
                parts = parts_of_rows(settings.split, group, table, times)
                sizes += np.bincount(parts, minlength=4)
                if table is not None:
                    table = table.filter(pa.array(parts == TRAIN))
            else:
                sizes[TRAIN] += group.rows
            if table is None:
                continue
            for name in standardized:
                _add_moments(totals[name], dense_values(table, name, settings.dense[name], group))
            for name in with_vocabulary:
                counts[name].append(pc.value_counts(flat_ids(table, name, settings.sparse[name], group)))
        rows: dict[str, int] = {part: int(sizes[index]) for index, part in enumerate(PARTS) if sizes[index]}
        for part, paths in (("validation", settings.validation), ("test", settings.test)):
            if paths:
                rows[part] = open_files(paths, wanted_columns(settings)).rows
        if not rows.get("train"):
            raise ValueError("the training part is empty: check data.split against the data")
        vocabularies = {
            name: _vocabulary(name, counts[name], settings.sparse[name].num_embeddings) for name in with_vocabulary
        }
        return cls({name: _moments(total) for name, total in totals.items()}, vocabularies, times, rows)

    def save(self, folder: Path) -> None:
        """Writes ``encoding.json`` and a Parquet file per vocabulary into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in self.vocabularies.items():
            temporary = folder / f"vocabulary-{name}.parquet.tmp"
            with temporary.open("wb") as file:
                pq.write_table(pa.table({"value": values}), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / f"vocabulary-{name}.parquet")
        content = {
            "format": FORMAT,
            "moments": self.moments,
            "vocabularies": list(self.vocabularies),
            "times": self.times,
            "rows": self.rows,
        }
        temporary = folder / "encoding.json.tmp"
        with temporary.open("w") as text:
            json.dump(content, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        temporary.replace(folder / "encoding.json")

    @classmethod
    def load(cls, folder: Path) -> Encoding:
        """Reads what ``save`` wrote.

        Raises:
            FileNotFoundError: the folder holds no encoding.
            ValueError: it is of a newer format or damaged.
        """
        path = folder / "encoding.json"
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file; the run folder is incomplete")
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']} is not {FORMAT}")
            vocabularies = {
                name: pq.read_table(folder / f"vocabulary-{name}.parquet")["value"].combine_chunks()
                for name in content["vocabularies"]
            }
            times = content["times"]
            return cls(
                {name: (mean, deviation) for name, (mean, deviation) in content["moments"].items()},
                {name: _one_array(values) for name, values in vocabularies.items()},
                None if times is None else (times[0], times[1]),
                content["rows"],
            )
        except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise ValueError(f"{path}: damaged or written by another version: {error}") from error


def wanted_columns(settings: DataSettings, require_label: bool = True) -> list[str]:
    """The columns that the settings name, each once; those of the split are not among them."""
    columns = [settings.label] if require_label else []
    if settings.sample_weight is not None and require_label:
        columns.append(settings.sample_weight)
    columns += [feature.column or name for name, feature in settings.dense.items()]
    for name, feature in settings.sparse.items():
        columns.append(feature.column or name)
        if feature.weights is not None:
            columns.append(feature.weights)
    return list(dict.fromkeys(columns))


def _one_array(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values


def _read(files: FileSet, columns: list[str]) -> Iterator[tuple[RowGroup, pa.Table | None]]:
    for group in files.row_groups:
        yield group, read_row_group(group, columns) if columns else None


def _times(settings: DataSettings, files: FileSet) -> tuple[float, float] | None:
    split = settings.split
    if not isinstance(split, TimeSplit):
        return None
    if split.column not in files.schema.names:
        raise ValueError(f"split.column {split.column!r} is no column of the data")
    if split.validation_from is not None and split.test_from is not None:
        kind = files.schema.field(split.column).type
        return boundary(split.validation_from, kind, split.column), boundary(split.test_from, kind, split.column)
    times = np.concatenate(
        [as_number(read_row_group(group, [split.column])[split.column], split.column) for group in files.row_groups]
    )
    times.sort()
    first_validation = min(round(len(times) * split.shares.train), len(times) - 1)
    first_test = min(round(len(times) * (split.shares.train + split.shares.validation)), len(times) - 1)
    return times[first_validation].item(), times[first_test].item()


def _add_moments(total: np.ndarray, values: np.ndarray) -> None:
    """Adds a part's count, mean and sum of squared deviations to the total (Chan, Golub and LeVeque, 1979)."""
    if not len(values):
        return
    count, mean, deviation = total
    new_mean = values.mean(dtype=np.float64)
    difference = new_mean - mean
    both = count + len(values)
    total[0] = both
    total[1] = mean + difference * len(values) / both
    total[2] = deviation + ((values - new_mean) ** 2).sum(dtype=np.float64) + difference**2 * count * len(values) / both


def _moments(total: np.ndarray) -> tuple[float, float]:
    count, mean, deviation = total.tolist()
    spread = math.sqrt(deviation / count) if count else 0.0
    return mean, spread if spread > 0 else 1.0


def _vocabulary(name: str, counts: list[pa.StructArray], rows: int) -> pa.Array:
    """The values by falling frequency, then by value; at most ``rows - 1`` of them."""
    table = pa.table(
        {
            "value": pa.chunked_array([part.field("values") for part in counts]),
            "count": pa.chunked_array([part.field("counts") for part in counts]),
        }
    )
    totals = table.group_by("value").aggregate([("count", "sum")])
    totals = totals.sort_by([("count_sum", "descending"), ("value", "ascending")])
    if totals.num_rows > rows - 1:
        logger.warning(
            f"sparse feature {name!r} has {totals.num_rows} distinct values in the training part, more than its "
            f"vocabulary holds: all but the {rows - 1} most frequent share row 0 (raise num_embeddings to keep them)"
        )
    return _one_array(totals["value"].slice(0, rows - 1).combine_chunks())
