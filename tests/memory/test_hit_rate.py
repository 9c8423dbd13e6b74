"""The command line: from files to a table, and what it says where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_offload.config import read_config
from recsys_offload.data import Encoding, ParquetBatches
from recsys_offload.memory.hit_rate import main
from recsys_offload.memory.replacement import POLICIES
from recsys_offload.memory.trace import trace_of_columns, trace_of_training
from tests.small_run import write_settings

USERS = ["ann", "bob", "ann", None, "eve", "bob"]
TAGS = [[7, 7], [9], None, [], [8, None, 7], [9]]


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.parquet"
    columns = {"user": USERS, "tags": TAGS, "price": [0.5] * 6, "nothing": pa.nulls(6, pa.int64())}
    pq.write_table(pa.table(columns), path, row_group_size=4)
    return path


def run(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    assert main([*map(str, arguments), "--out", str(tmp_path / "out")]) == 0
    content: dict[str, Any] = json.loads((tmp_path / "out" / "hit_rate.json").read_text())
    return content


def batches(path: Path, **options: Any) -> list[list[int]]:
    trace = trace_of_columns([str(path)], ["user", "tags"], **options)
    return [trace.batch(number).tolist() for number in range(len(trace))]


def test_every_column_is_a_table_of_its_distinct_values(clicks: Path) -> None:
    # ann, bob, eve = 0, 1, 2; tags 7, 9, 8 = 3, 4, 5
    assert batches(clicks, batch_size=2) == [[0, 1, 3, 4], [0], [2, 1, 5, 3, 4]]
    assert batches(clicks, batch_size=2, row_limit=3) == [[0, 1, 2, 3], [0]]  # eve is not read
    assert batches(clicks, batch_size=4, epochs=2) == [[0, 1, 3, 4], [2, 1, 5, 3, 4]] * 2


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a", "c"]).dictionary_encode(),
        pa.array([5, 3, 5, 4], pa.uint8()),
        pa.array([["a"], ["b"], ["a"], ["c"]], pa.large_list(pa.large_string())),
        pa.array([[5], [3], [5], [4]], pa.list_(pa.int32(), 1)),
        pa.array([["a"], ["b"], ["a"], ["c"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    ],
    ids=str,
)
def test_types_of_columns(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"id": column}), tmp_path / "ids.parquet")
    trace = trace_of_columns([str(tmp_path)], ["id"], 1)
    assert trace.rows.tolist() == [0, 1, 0, 2]


def test_shuffling_reads_the_same_examples_in_another_order_each_epoch(tmp_path: Path) -> None:
    tags = [[value, value + 100] if value % 3 else None for value in range(40)]
    pq.write_table(pa.table({"user": range(40), "tags": tags}), tmp_path / "clicks.parquet")
    shuffled = batches(tmp_path, batch_size=1, epochs=2, shuffle_seed=5)
    in_order = batches(tmp_path, batch_size=1)
    first, second = shuffled[:40], shuffled[40:]
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert len({str(order) for order in (first, second, in_order)}) == 3
    assert batches(tmp_path, batch_size=1, epochs=2, shuffle_seed=5) == shuffled
    assert batches(tmp_path, batch_size=1, shuffle_seed=6) != first


def test_the_table_the_picture_and_the_numbers(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = run(tmp_path, clicks, "--columns", "user,tags", "--batch-size", 2, "--sizes", "1%,80%,100%", "--depth", 1)
    output = capsys.readouterr().out
    assert "1% (1 slots) is skipped: the largest batch uses 5 of 6 rows at once (83.3%)" in output
    assert (content["tables"], content["rows"], content["batches"], content["uses"]) == (["user", "tags"], 6, 3, 10)
    assert [(one["size"], one["slots"]) for one in content["sizes"]] == [("80%", 5), ("100%", 6)]
    # Of [0, 1, 3, 4], [0], [2, 1, 5, 3, 4] the second finds its row, and the third 1, 3 and 4.
    assert content["sizes"][0]["hit_rates"] == dict.fromkeys(POLICIES, 0.4)
    assert all(name.split(",")[0] in output for name in POLICIES)
    assert output.count("40.00") == 2 * len(POLICIES)
    assert matplotlib.image.imread(tmp_path / "out" / "hit_rate.png").shape[2] == 4


def test_a_configuration_is_read_as_training_reads_it(tmp_path: Path) -> None:
    path = write_settings(tmp_path)
    config = read_config(path)
    loader = ParquetBatches(config.data, Encoding.fit(config.data), "train", 64, seed=config.run.seed, shuffle=True)
    expected = []
    for _ in range(2):
        for batch in loader:
            ids = [batch.sparse[key].values().numpy() for key in ("user", "item", "tags")]
            expected.append({*ids[0].tolist(), *(20 + ids[1]).tolist(), *(30 + ids[2]).tolist()})
    trace = trace_of_training(config, epochs=2)
    assert [set(trace.batch(number).tolist()) for number in range(len(trace))] == expected
    assert trace.row_count == 36

    content = run(tmp_path, "--train.batch_size", 16, path, "--rows", 100, "--sizes=100%", "--run.seed=4")
    assert content["batches"] == 7  # of 16, the last of which reaches 100
    assert content["tables"] == ["user", "item", "tags"]


def test_a_table_that_features_share_is_one_table(tmp_path: Path) -> None:
    shared = {"num_embeddings": 20, "table": "all"}
    data = {"sparse": {"user": shared, "item": shared, "tags": {"num_embeddings": 6}}}
    trace = trace_of_training(read_config(write_settings(tmp_path, data=data)))
    assert (trace.names, trace.row_count) == (["all", "tags"], 26)
    assert set(trace.rows.tolist()) == set(range(26))


def test_ids_without_a_row(tmp_path: Path) -> None:
    def tables(**embedding: Any) -> set[int]:
        sparse = {"user": {"num_embeddings": 15}, "item": {"num_embeddings": 10}, "tags": {"num_embeddings": 6}}
        path = write_settings(tmp_path, data={"sparse": sparse}, embedding=embedding)
        return set(trace_of_training(read_config(path)).rows.tolist())

    with pytest.raises(ValueError, match=r"feature 'user': id 1\d is outside \[0, 15\)"):
        tables()
    assert tables(invalid_ids="modulo") == set(range(31))
    assert tables(invalid_ids="fallback", fallback_row=2) == set(range(31))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CLICKS"], "name the columns of CLICKS that hold ids: --columns"),
        (["missing.parquet", "--columns", "user"], "'missing.parquet': no such file"),
        (["missing.yaml"], "no configuration file 'missing.yaml'"),
        (["CLICKS", "--columns", "user,tag"], "CLICKS: no column 'tag'; did you mean 'tags'?"),
        (["CLICKS", "--columns", "price"], "CLICKS: column 'price' is double, but ids are integers"),
        (["CLICKS", "--columns", "nothing"], "CLICKS: column 'nothing' holds only nulls"),
        (["CLICKS", "--columns", "user", "--sizes", "5%,0%"], "'0%' is not a share of the rows"),
        (["CLICKS", "--columns", "user", "--sizes", "101%"], "'101%' is not a share of the rows"),
        (["CLICKS", "--columns", "user", "--sizes", "ten"], "'ten' is not a share of the rows"),
        (
            ["CLICKS", "--columns", "user", "--sizes", "1%,5%"],
            "no size of 1%, 5% is enough, for the largest batch uses",
        ),
        (["CLICKS", "--columns", "user", "--seed", "1"], "--seed 1 has no meaning without --shuffle"),
        (
            ["CLICKS", "--columns", "user", "--train.batch_size", "5"],
            "--train.batch_size is a setting of a configuration",
        ),
        (["CLICKS", "some.yaml"], "one configuration and nothing else"),
        (["some.yaml", "--batch-size", "5"], "--batch-size is for Parquet files"),
        (["EMPTY", "--columns", "user"], "hold no rows"),
        (["SETTINGS", "--train.batch_sise", "5"], "did you mean 'train.batch_size'?"),
        (["SETTINGS", "--train.batch_size"], "--train.batch_size needs a value"),
    ],
)
def test_mistakes_are_named_in_one_line(
    arguments: list[str], message: str, clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"user": pa.array([], pa.int64())}), empty)
    paths = {"CLICKS": clicks, "EMPTY": empty}
    if "SETTINGS" in arguments:
        clicks.unlink()
        paths["SETTINGS"] = write_settings(tmp_path)
    given = [str(paths.get(argument, argument)) for argument in arguments]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert message.replace("CLICKS", str(clicks)) in output.err
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--depth", "-1"], ["--batch-size", "0"], ["--rows", "x"], ["--unknown", "1"]])
def test_argparse_refuses_numbers_out_of_range(
    arguments: list[str], clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(clicks), "--columns", "user", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_list_with_only_nulls_in_the_rows_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"tags": [[None], [], [3]]}), tmp_path / "tags.parquet")
    assert main([str(tmp_path / "tags.parquet"), "--columns", "tags", "--rows", "2"]) == 2
    assert "tags hold only nulls and empty lists" in capsys.readouterr().err


def test_help_explains_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in POLICIES)


def test_rows_are_numbered_over_all_files(tmp_path: Path) -> None:
    for number, users in enumerate((["x", "y"], ["y", "z"])):
        pq.write_table(pa.table({"user": users}), tmp_path / f"part-{number}.parquet")
    trace = trace_of_columns([str(tmp_path)], ["user"], 2)
    assert np.array_equal(trace.rows, [0, 1, 1, 2])
