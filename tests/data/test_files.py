"""Paths stand for files, and files for row groups."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_offload.data.files import find_files, open_files, read_row_group

GOOD = {"label": [0, 1, 0], "user": [1, 2, 3]}


def test_paths_that_stand_for_nothing(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none.parquet", "no such file"),
        (tmp_path / "*.parquet", "no such file"),
        (tmp_path, r"holds no \*\.parquet"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            find_files([str(path)])


def test_files_directories_and_globs(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.parquet", "a.parquet", "deep/c.parquet"):
        pq.write_table(pa.table(GOOD), tmp_path / name)
    names = [path.name for path in find_files([str(tmp_path)])]
    assert names == ["a.parquet", "b.parquet", "c.parquet"]
    assert [path.name for path in find_files([f"{tmp_path}/*.parquet"])] == ["a.parquet", "b.parquet"]
    several = find_files([f"{tmp_path}/deep", f"{tmp_path}/b.parquet", f"{tmp_path}/*.parquet"])
    assert [path.name for path in several] == ["c.parquet", "b.parquet", "a.parquet"]


def test_a_directory_may_look_like_a_file_and_hold_hidden_ones(tmp_path: Path) -> None:
    folder = tmp_path / "clicks.parquet"
    folder.mkdir()
    for name in ("part-1.parquet", "part-0.parquet", ".part-0.parquet", "_metadata.parquet", "_SUCCESS"):
        pq.write_table(pa.table(GOOD), folder / name)
    expected = [folder / "part-0.parquet", folder / "part-1.parquet"]
    for path in (tmp_path, folder, tmp_path / "*.parquet"):
        assert find_files([str(path)]) == expected, path
    assert find_files([str(folder), f"{folder}/../clicks.parquet/part-0.parquet"]) == expected
    # A file that is named is read, whatever its name.
    assert find_files([f"{folder}/.part-0.parquet"]) == [folder / ".part-0.parquet"]


def test_row_groups_are_counted_through_all_files(tmp_path: Path) -> None:
    table = pa.table({"x": range(10)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=7)
    files = open_files([str(tmp_path)], ["x"])
    assert files.rows == 20
    found = [(group.path.stem, group.index, group.rows, group.first_row) for group in files.row_groups]
    assert found == [("a", 0, 4, 0), ("a", 1, 4, 4), ("a", 2, 2, 8), ("c", 0, 7, 10), ("c", 1, 3, 17)]
    for group in files.row_groups:
        assert read_row_group(group, ["x"])["x"].to_pylist() == group.row_numbers.tolist()


def test_names_with_dots_and_names_twice(tmp_path: Path) -> None:
    columns = {"a.b": [None, 2.0], "a": pa.array([None, None], pa.int64()), "l": [[1], None], "l.x": [1, 2]}
    pq.write_table(pa.table(columns), tmp_path / "dots.parquet")
    files = open_files([f"{tmp_path}/dots.parquet"], ["a.b", "l", "l.x"])
    assert read_row_group(files.row_groups[0], ["a.b", "l"]).select(["a.b", "l"]).num_columns == 2
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice.parquet: 2 columns are called 'x'; rename all but one"):
        open_files([f"{tmp_path}/twice.parquet"], ["x"])


def test_a_column_without_a_value_is_refused_only_if_no_file_has_one(tmp_path: Path) -> None:
    empty = pa.table({"x": pa.array([None, None], pa.int64())})
    pq.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: column 'x' holds only nulls or empty lists; leave it out"):
        open_files([str(tmp_path)], ["x"])
    pq.write_table(pa.table({"x": [None, 1]}), tmp_path / "b.parquet")
    assert open_files([str(tmp_path)], ["x"]).rows == 4


def test_a_missing_column_with_no_name_near(tmp_path: Path) -> None:
    pq.write_table(pa.table(GOOD), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: no column 'zebra'\. Its columns: label, user"):
        open_files([str(tmp_path)], ["zebra"])
