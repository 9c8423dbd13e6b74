"""From paths to Parquet files and their row groups, checked before anything is read."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys_offload.data.arrays import is_list


@dataclass(frozen=True)
class RowGroup:
    """One row group of one file.

    Attributes:
        path: of the file.
        index: of the row group in it.
        rows: that it holds.
        first_row: the number of its first row, counted over all files of the part.
        row_in_file: the number of its first row in its file.
    """

    path: Path
    index: int
    rows: int
    first_row: int
    row_in_file: int

    @property
    def row_numbers(self) -> np.ndarray:
        """The number in the file of each row, int64 ``[rows]``."""
        return np.arange(self.row_in_file, self.row_in_file + self.rows)


@dataclass(frozen=True)
class Source:
    """Where the rows of a table came from, for messages.

    Attributes:
        path: of the file.
        numbers: of the rows in the file, int64 ``[rows]``.
    """

    path: Path
    numbers: np.ndarray

    def where(self, row: int) -> str:
        """The place of a row of the table."""
        return f"row {self.numbers[row]} of {self.path}"


@dataclass(frozen=True)
class FileSet:
    """The files of a part, in order.

    Attributes:
        schema: that all share, as far as the wanted columns go.
        row_groups: of all files.
    """

    schema: pa.Schema
    row_groups: list[RowGroup]

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.row_groups)


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that ``paths`` stand for, each once: files as they are, the sorted matches of globs, and the sorted
    ``*.parquet`` files in and below directories, without those that are hidden (their name begins with . or _).

    Raises:
        FileNotFoundError: a path stands for no file.
    """
    found: dict[Path, Path] = {}
    for text in paths:
        path = Path(text)
        matches = [path] if path.exists() else sorted(Path(match) for match in glob.glob(text, recursive=True))  # noqa: PTH207 - may be absolute
        here = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
        if not here:
            kind = "the directory holds no *.parquet file" if path.is_dir() else "no such file, directory or match"
            raise FileNotFoundError(f"data path {text!r}: {kind} (looked from {Path.cwd()})")
        for file in here:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _files_below(folder: Path) -> list[Path]:
    # Some tools write a data set as a directory that is itself called something.parquet.
    return sorted(path for path in folder.rglob("*.parquet") if path.is_file() and path.name[0] not in "._")


def _open(path: Path) -> pq.ParquetFile:
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes); write it again or leave it out")
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file (truncated or of another format): {error}") from error


def _check_columns(path: Path, schema: pa.Schema, wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"{path}: no column {name!r}{hint} Its columns: {', '.join(schema.names)}")
        if schema.names.count(name) > 1:
            raise ValueError(f"{path}: {schema.names.count(name)} columns are called {name!r}; rename all but one")
        kind = schema.field(name).type
        if pa.types.is_null(kind.value_type if is_list(kind) else kind):
            raise ValueError(
                f"{path}: column {name!r} holds only nulls or empty lists, and is of type {kind}; write it with the "
                "type of its values, or leave it out of the settings"
            )


def _all_null_columns(metadata: pq.FileMetaData, wanted: Sequence[str]) -> set[str]:
    """The wanted columns of which the file's statistics say that every value is null."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    empty = set()
    for name in wanted:
        leaves = [index for index, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
        chunks = [group.column(leaf) for group in groups for leaf in leaves]
        if chunks and all(
            chunk.statistics is not None
            and chunk.statistics.has_null_count
            and chunk.statistics.null_count == chunk.num_values
            for chunk in chunks
        ):
            empty.add(name)
    return empty


def open_files(paths: Sequence[str], wanted: Sequence[str]) -> FileSet:
    """Opens every file's footer and checks that it has the wanted columns, of the same types as the first file's.

    Raises:
        FileNotFoundError: a path stands for no file.
        ValueError: a file is unreadable or empty, lacks a column, or differs from the first; a wanted column has no
            value in any file; or the files hold no rows.
    """
    row_groups: list[RowGroup] = []
    first_schema: pa.Schema | None = None
    first_path = Path()
    all_null = set(wanted)
    total = 0
    for path in find_files(paths):
        with _open(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
        _check_columns(path, schema, wanted)
        if first_schema is None:
            first_schema, first_path = schema, path
        for name in wanted:
            here, there = schema.field(name).type, first_schema.field(name).type
            if here != there:
                raise ValueError(f"{path}: column {name!r} is {here}, but {there} in {first_path}; write them alike")
        if metadata.num_rows:
            all_null &= _all_null_columns(metadata, sorted(all_null))
        row_in_file = 0
        for index in range(metadata.num_row_groups):
            rows = metadata.row_group(index).num_rows
            if rows:
                row_groups.append(RowGroup(path, index, rows, total, row_in_file))
            total += rows
            row_in_file += rows
    if first_schema is None or total == 0:
        raise ValueError(f"the files of {', '.join(paths)} hold no rows")
    if all_null:
        names = ", ".join(repr(name) for name in sorted(all_null))
        raise ValueError(f"{first_path}: column {names} holds only nulls or empty lists; leave it out of the settings")
    return FileSet(first_schema, row_groups)


def read_row_group(group: RowGroup, columns: Sequence[str]) -> pa.Table:
    """Decodes columns of a row group, on Arrow's threads.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with pq.ParquetFile(group.path, memory_map=True) as file:
            return file.read_row_group(group.index, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{group.path}, row group {group.index}: cannot be read, the file is damaged: {error}"
        ) from error
