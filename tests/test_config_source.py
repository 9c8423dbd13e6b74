"""Settings from YAML and the command line, on a small tree of every kind of field."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError
from rich.console import Console

from recsys_offload.config_errors import check_keys, explain
from recsys_offload.config_help import print_help, setting_helps
from recsys_offload.config_source import ConfigError, apply_override, parse_arguments, read_yaml
from recsys_offload.settings import ByteSize, Rate, Settings


class Feature(Settings):
    """A feature."""

    num_embeddings: int = Field(ge=1, description="Rows of the table.")
    pooling: Literal["sum", "mean"] = Field("sum", description="How a bag is pooled.")
    nulls: Literal["skip"] | int = Field("skip", description="What null means.")


class Split(Settings):
    """A split by hash."""

    by: Literal["hash"] = Field("hash", description="Kind.")
    shares: list[Rate] = Field([0.8, 0.1, 0.1], description="Shares of the parts.")


class ColumnSplit(Settings):
    """A split by column."""

    by: Literal["column"] = Field(description="Kind.")
    column: str = Field(description="The column.")


class DataPart(Settings):
    """The data."""

    files: str | list[str] = Field(description="Parquet files.")
    sparse: dict[str, Feature] = Field(default_factory=dict, description="Sparse features.")
    split: Annotated[Split | ColumnSplit, Field(discriminator="by")] | None = Field(None, description="How to split.")


class TrainPart(Settings):
    """Training."""

    batch_size: int = Field(2048, ge=1, description="Examples per step.")
    memory: ByteSize = Field(ByteSize(1 << 30), description="Host memory.")
    dropout: Rate = Field(0.0, description="Share of dropped units.")
    layers: list[int] = Field([64, 32], description="Widths.")
    name: str | None = Field(None, description="A name.")


class Tree(Settings):
    """The whole."""

    data: DataPart = Field(description="The data.")
    train: TrainPart = Field(default_factory=TrainPart, description="Training.")


def _tree() -> dict[str, Any]:
    return {"data": {"files": "x.parquet", "sparse": {"user_id": {"num_embeddings": 5}}}}


def _load(arguments: list[str], tree: dict[str, Any] | None = None) -> Tree:
    tree = _tree() if tree is None else tree
    for key, text in parse_arguments(arguments)[1]:
        apply_override(Tree, tree, key, text)
    check_keys(Tree, tree)
    try:
        return Tree(**tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Tree, tree, "x.yaml")) from error


def test_overrides_reach_every_kind_of_field() -> None:
    tree = _load(
        [
            *("--train.batch_size", "4096"),
            "--train.memory=8GiB",
            *("--data.sparse.user_id.num_embeddings", "100"),
            *("--train.layers", "[8, 4]"),
            *("--data.files", '["a", "b"]'),
            *("--train.dropout", "1e-3"),
            *("--train.name", "2026"),
            *("--data.split.by", "column"),
            "--data.split.column=day",
            *("--data.sparse.item", "{num_embeddings: 3, nulls: 0}"),
        ]
    )
    assert tree.train.batch_size == 4096
    assert tree.train.memory == 8 << 30
    assert tree.data.sparse["user_id"].num_embeddings == 100
    assert tree.data.sparse["item"].nulls == 0
    assert tree.train.layers == [8, 4]
    assert tree.data.files == ["a", "b"]
    assert tree.train.dropout == 0.001
    assert tree.train.name == "2026"
    assert tree.data.split == ColumnSplit(by="column", column="day")


def test_null_on_the_command_line_is_null() -> None:
    tree = _tree()
    tree["train"] = {"name": "given"}
    assert _load(["--train.name", "null"], tree).train.name is None


def test_positional_arguments_are_kept_apart() -> None:
    assert parse_arguments(["a.yaml", "--x.y", "-3", "--z={a: 1}"]) == (
        ["a.yaml"],
        [("x.y", "-3"), ("z", "{a: 1}")],
    )


@pytest.mark.parametrize("arguments", [["--train.batch_size"], ["--train.batch_size", "--train.name", "x"]])
def test_an_option_without_a_value_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--train\.batch_size needs a value"):
        parse_arguments(arguments)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("train.batchsize", "train.batch_size"),
        ("trian.batch_size", "train.batch_size"),
        ("batch_size", "train.batch_size"),
        ("data.batch_size", "train.batch_size"),
        ("data.sparse.user_id.num_embedings", "data.sparse.user_id.num_embeddings"),
        ("data.sparse.usr_id.num_embeddings", "data.sparse.user_id.num_embeddings"),
        ("data.split.columm", "data.split.column"),
        ("dat", "data"),
        ("train.batch_size.x", "train.batch_size"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting '{wrong}': did you mean '{nearest}'\?"):
        _load([f"--{wrong}=1"])


def test_unknown_keys_in_the_file_are_refused_at_any_depth() -> None:
    tree = _tree()
    tree["data"]["sparse"]["user_id"]["poling"] = "sum"
    with pytest.raises(ConfigError, match=r"'data.sparse.user_id.poling'.*'data.sparse.user_id.pooling'"):
        check_keys(Tree, tree)
    with pytest.raises(ConfigError, match=r"unknown setting 'trai': did you mean 'train'"):
        check_keys(Tree, {"trai": {}})
    with pytest.raises(ConfigError, match=r"unknown setting 'zzzz': --help lists"):
        check_keys(Tree, {"zzzz": {}})


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--train.batch_size", "-3"], ["train.batch_size cannot be -3", "greater than or equal to 1", "Examples per"]),
        (["--train.batch_size", "many"], ["train.batch_size cannot be 'many'", "integer"]),
        (["--train.dropout", "1.5"], ["train.dropout cannot be 1.5", "less than or equal to 1"]),
        (["--train.dropout", ".nan"], ["train.dropout cannot be nan"]),
        (["--train.memory", "8 bananas"], ["train.memory cannot be '8 bananas'", "byte"]),
        (["--data.sparse.user_id.pooling", "max"], ["data.sparse.user_id.pooling cannot be 'max'", "'sum' or 'mean'"]),
        (["--data.sparse.x", "{pooling: sum}"], ["data.sparse.x.num_embeddings is missing", "it must be given"]),
        (["--train.layers", "[1, x]"], ["train.layers.1 cannot be 'x'"]),
        (["--data.split", "{by: time}"], ["data.split.by cannot be 'time'", "it should be one of 'hash', 'column'"]),
        (["--data.split", "{column: day}"], ["data.split.by is missing"]),
        (["--data.split", "{by: column}"], ["data.split.column is missing"]),
        (["--data.split", "{by: hash, shares: [2]}"], ["data.split.shares.0 cannot be 2"]),
        (["--train", "3"], ["train cannot be 3"]),
        (["--data.sparse.user_id.nulls", "[]"], ["data.sparse.user_id.nulls cannot be []", "'skip'", "integer"]),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(arguments)
    for part in parts:
        assert part in str(raised.value)


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        _load(["--train.batch_size", "0", "--train.dropout", "2"])
    assert "train.batch_size" in str(raised.value) and "train.dropout" in str(raised.value)


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("train:\n  batch_size: 3\n data: [\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml:3:\d+: not valid YAML"):
        read_yaml(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("train:\n  batch_size: 3\n  batch_size: 4\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml:3:3: .*'batch_size' is given twice"):
        read_yaml(path)


def test_a_missing_file_and_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file 'nowhere\.yaml'"):
        read_yaml(Path("nowhere.yaml"))
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold sections"):
        read_yaml(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_yaml(tmp_path)


def test_help_lists_every_setting_with_type_default_and_meaning() -> None:
    lines = {line.key: line for line in setting_helps(Tree)}
    assert lines["train.batch_size"].type == "int (>= 1)"
    assert lines["train.batch_size"].default == "2048"
    assert lines["data.sparse.<name>.num_embeddings"].default == "(required)"
    assert lines["data.sparse.<name>.pooling"].type == "sum | mean"
    assert lines["data.split.column"].description == "The column."
    stream = io.StringIO()
    print_help(Tree, "usage: x [CONFIG]", Console(file=stream, width=120))
    text = stream.getvalue()
    assert "usage: x [CONFIG]" in text
    for line in lines.values():
        assert f"--{line.key}" in text.replace("\n", "") or line.key in ("data", "train")


def test_every_description_of_the_test_tree_is_shown() -> None:
    assert all(line.description for line in setting_helps(Tree))
