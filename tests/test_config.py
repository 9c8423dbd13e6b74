"""The real tree of settings: the command line, reloading, and the files in configs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsys_offload.config import Config, ConfigError, changes, dump, load_config
from recsys_offload.config_help import setting_helps
from tests.small_run import write_settings

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_overrides_change_the_file(tmp_path: Path) -> None:
    path = write_settings(tmp_path)
    config = load_config(
        [str(path), "--train.batch_size", "4096", "--data.sparse.user.num_embeddings=100", "--model.over_layers", "[8]"]
    )
    assert config.train.batch_size == 4096
    assert config.data.sparse["user"].num_embeddings == 100
    assert config.data.sparse["item"].num_embeddings == 10
    assert config.model.over_layers == [8]


def test_the_dumped_settings_reload_to_equal_ones(tmp_path: Path) -> None:
    path = write_settings(tmp_path, schedules={"sparse": {"name": "cosine", "warmup_steps": 3}})
    config = load_config([str(path)])
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load_config([str(again)]) == config
    assert "evaluation_interval_steps: null" in again.read_text()  # defaults are spelt out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_files_load_and_reload(path: Path, tmp_path: Path) -> None:
    config = load_config([str(path)])
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load_config([str(again)]) == config


def test_there_are_shipped_files() -> None:
    assert {"movielens.yaml", "open_bandit.yaml", "criteo_like.yaml"} <= {path.name for path in CONFIGS}


def test_changes_name_the_dotted_settings(tmp_path: Path) -> None:
    path = write_settings(tmp_path)
    old = load_config([str(path)])
    new = load_config([str(path), "--train.batch_size", "32", "--data.sparse.extra", "{num_embeddings: 3}"])
    differing = changes(old, new)
    assert differing["train.batch_size"] == (64, 32)
    assert differing["data.sparse.extra.num_embeddings"] == (None, 3)
    assert changes(old, old) == {}


def test_the_order_of_features_is_a_change(tmp_path: Path) -> None:
    old = load_config([str(write_settings(tmp_path))])
    tree = old.model_dump(mode="json")
    tree["data"]["sparse"] = dict(reversed(tree["data"]["sparse"].items()))
    assert changes(old, Config(**tree)) == {"data.sparse (order)": (["user", "item", "tags"], ["tags", "item", "user"])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.bach_size", "3"], "unknown setting 'train.bach_size': did you mean 'train.batch_size'"),
        (["--learning_rate", "3"], "unknown setting 'learning_rate': did you mean '[a-z_.]*learning_rate'"),
        (["--data.sparse.usr.num_embeddings", "3"], "did you mean 'data.sparse.user.num_embeddings'"),
        (["--train.epochs", "null"], "one of epochs and steps must be given"),
        (["--dense_optimizer.momentum", "0.9"], "momentum belongs to name: sgd"),
        (["--run.name", "a/b"], "run.name cannot be 'a/b'"),
        (["--embedding.optimizer.learning_rate", "-1"], "embedding.optimizer.learning_rate cannot be -1"),
        (["second.yaml"], "expected one configuration file"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([str(write_settings(tmp_path)), *arguments])


def test_mistakes_in_the_file_name_the_file(tmp_path: Path) -> None:
    path = write_settings(tmp_path, train={"batch_size": 0})
    with pytest.raises(ConfigError, match=r"config\.yaml: train\.batch_size cannot be 0"):
        load_config([str(path)])
    path = write_settings(tmp_path, data={"sparse": {"user": {"num_rows": 3}}})
    with pytest.raises(ConfigError, match=r"unknown setting 'data\.sparse\.user\.num_rows'"):
        load_config([str(path)])


def test_every_setting_is_explained() -> None:
    lines = list(setting_helps(Config))
    assert len(lines) > 50
    assert [line.key for line in lines if not line.description or not line.type] == []
