"""What is learned from the training part before training: means, vocabularies, boundaries and sizes."""

from __future__ import annotations

import json
import logging
import math
import os
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_offload.data.arrays import one_array
from recsys_offload.data.config import PARTS, DataSettings, TimeSplit
from recsys_offload.data.convert import dense_values, flat_ids
from recsys_offload.data.files import FileSet, RowGroup, Source, open_files, read_row_group
from recsys_offload.data.split import TRAIN, as_number, boundary, parts_of_rows, split_columns

logger = logging.getLogger(__name__)

FORMAT = 1
# Times from which the boundaries of a split by shares are found: all of them up to this many, then every n-th.
TIMES_SAMPLED = 2**22
# Counted values are merged only once this many, or as many as there are already, have come together.
COUNTS_PENDING = 2**20


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
        by = [] if settings.split is None else split_columns(settings.split)
        files = open_files(settings.train, list(dict.fromkeys(wanted_columns(settings) + by)))
        times = _times(settings, files)
        standardized = [name for name, feature in settings.dense.items() if feature.transform == "standardize"]
        with_vocabulary = [name for name, feature in settings.sparse.items() if feature.encoding == "vocabulary"]
        columns = [settings.dense[name].column or name for name in standardized]
        columns += [settings.sparse[name].column or name for name in with_vocabulary]
        columns += by
        totals = {name: np.zeros(3) for name in standardized}
        counts: dict[str, list[pa.Table]] = {name: [] for name in with_vocabulary}
        sizes = np.zeros(4, np.int64)
        for group, table in _read(files, list(dict.fromkeys(columns))):
            numbers = group.row_numbers
            if settings.split is not None:
                parts = parts_of_rows(settings.split, group, table, times)
                sizes += np.bincount(parts, minlength=4)
                if table is not None:
                    table, numbers = table.filter(pa.array(parts == TRAIN)), numbers[parts == TRAIN]
            else:
                sizes[TRAIN] += group.rows
            if table is None:
                continue
            source = Source(group.path, numbers)
            for name in standardized:
                _add_moments(totals[name], dense_values(table, name, settings.dense[name], source))
            for name in with_vocabulary:
                _add_counts(counts[name], flat_ids(table, name, settings.sparse[name], source))
        rows: dict[str, int] = {part: int(sizes[index]) for index, part in enumerate(PARTS) if sizes[index]}
        for part, paths in (("validation", settings.validation), ("test", settings.test)):
            if paths:
                rows[part] = open_files(paths, wanted_columns(settings)).rows
        if not rows.get("train"):
            raise ValueError("the training part is empty: check data.split against the data")
        vocabularies = {
            name: _vocabulary(name, counts[name], settings.sparse[name].num_embeddings) for name in with_vocabulary
        }
        return cls({name: _moments(name, total) for name, total in totals.items()}, vocabularies, times, rows)

    def save(self, folder: Path) -> None:
        """Writes ``encoding.json`` and a Parquet file per vocabulary into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in self.vocabularies.items():
            path = _vocabulary_path(folder, name)
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                pq.write_table(pa.table({"value": values}), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
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
                name: one_array(pq.read_table(_vocabulary_path(folder, name))["value"])
                for name in content["vocabularies"]
            }
            times = content["times"]
            return cls(
                {name: (mean, deviation) for name, (mean, deviation) in content["moments"].items()},
                vocabularies,
                None if times is None else (times[0], times[1]),
                content["rows"],
            )
        except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
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


def _vocabulary_path(folder: Path, name: str) -> Path:
    return folder / f"vocabulary-{urllib.parse.quote(name, safe='')}.parquet"


def _read(files: FileSet, columns: list[str]) -> Iterator[tuple[RowGroup, pa.Table | None]]:
    for group in files.row_groups:
        yield group, read_row_group(group, columns) if columns else None


def _times(settings: DataSettings, files: FileSet) -> tuple[float, float] | None:
    split = settings.split
    if not isinstance(split, TimeSplit):
        return None
    if split.validation_from is not None and split.test_from is not None:
        kind = files.schema.field(split.column).type
        given = boundary(split.validation_from, kind, split.column), boundary(split.test_from, kind, split.column)
        if given[0] > given[1]:
            raise ValueError(f"split: validation_from {split.validation_from} is after test_from {split.test_from}")
        return given
    sample, newest = _sampled_times(files, split.column)
    # A part that begins after the newest time is empty.
    after = newest + 1 if isinstance(newest, int) else math.nextafter(newest, math.inf)
    firsts = [
        round(len(sample) * share) for share in (split.shares.train, split.shares.train + split.shares.validation)
    ]
    validation, test = (sample[first].item() if first < len(sample) else after for first in firsts)
    return validation, test


def _sampled_times(files: FileSet, column: str) -> tuple[np.ndarray, int | float]:
    """Every n-th time of the files, sorted, and the newest of all; n is 1 unless there are very many."""
    kept: list[np.ndarray] = []
    step, seen, newest = 1, 0, -math.inf
    for group in files.row_groups:
        times = as_number(read_row_group(group, [column]), column, group.path)
        kept.append(times[-seen % step :: step].copy())
        seen += len(times)
        newest = max(newest, times.max().item())
        if sum(map(len, kept)) > TIMES_SAMPLED:
            kept = [np.concatenate(kept)[::2].copy()]
            step *= 2
    return np.sort(np.concatenate(kept)), newest


def _add_moments(total: np.ndarray, values: np.ndarray) -> None:
    """Adds a part's count, mean and sum of squared deviations to the total (Chan, Golub and LeVeque, 1979)."""
    if not len(values):
        return
    count, mean, _ = total
    new_mean = values.mean(dtype=np.float64)
    difference = new_mean - mean
    both = count + len(values)
    total[0] = both
    total[1] = mean + difference * len(values) / both
    with np.errstate(over="ignore", invalid="ignore"):  # found out by _moments
        total[2] += ((values - new_mean) ** 2).sum(dtype=np.float64) + difference**2 * count * len(values) / both


def _moments(name: str, total: np.ndarray) -> tuple[float, float]:
    count, mean, deviation = total.tolist()
    if not count:
        raise ValueError(f"dense feature {name!r} cannot be standardized: it has no value in the training part")
    spread = math.sqrt(deviation / count)
    if not math.isfinite(spread):
        raise ValueError(f"dense feature {name!r} cannot be standardized: its values are too large")
    # All values are the same, but for what rounding made of the mean.
    constant = spread <= 1e-13 * abs(mean)
    return mean, 1.0 if constant else spread


def _add_counts(counts: list[pa.Table], values: pa.Array) -> None:
    """Counts values; ``counts[0]`` is merged from those before, so that repeated values take no memory."""
    counted = pc.value_counts(values)
    counts.append(pa.table([counted.field("values"), counted.field("counts")], ["value", "count"]))
    if sum(part.num_rows for part in counts[1:]) > max(COUNTS_PENDING, counts[0].num_rows):
        counts[:] = [_merged_counts(counts)]


def _merged_counts(counts: list[pa.Table]) -> pa.Table:
    totals = pa.concat_tables(counts).group_by("value").aggregate([("count", "sum")])
    return totals.select(["value", "count_sum"]).rename_columns(["value", "count"])


def _vocabulary(name: str, counts: list[pa.Table], rows: int) -> pa.Array:
    """The values by falling frequency, then by value; at most ``rows - 1`` of them."""
    totals = _merged_counts(counts).sort_by([("count", "descending"), ("value", "ascending")])
    if not totals.num_rows:
        raise ValueError(f"sparse feature {name!r} has no vocabulary: it has no value in the training part")
    if totals.num_rows > rows - 1:
        logger.warning(
            f"sparse feature {name!r} has {totals.num_rows} distinct values in the training part, more than its "
            f"vocabulary holds: all but the {rows - 1} most frequent share row 0 (raise num_embeddings to keep them)"
        )
    return one_array(totals["value"].slice(0, rows - 1))
