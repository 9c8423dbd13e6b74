"""The whole tree of settings: composed from the components', read from YAML and the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from recsys_offload.checkpoint import CheckpointSettings
from recsys_offload.config_errors import check_keys, explain
from recsys_offload.config_source import ConfigError, apply_override, parse_arguments, read_yaml
from recsys_offload.data import DataSettings
from recsys_offload.dense_optimizer import DenseOptimizerSettings
from recsys_offload.embedding.config import EmbeddingSettings
from recsys_offload.models import ModelSettings
from recsys_offload.schedules import SchedulesSettings
from recsys_offload.settings import Settings

__all__ = ["Config", "ConfigError", "LoggingSettings", "RunSettings", "TrainSettings", "changes", "dump", "load_config"]


class RunSettings(Settings):
    """The run, and the folder that holds all it writes."""

    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$", description="The name of the run (no slashes).")
    root: Path = Field(Path("runs"), description="Where run folders are made, as <root>/<name>-<date>-<time>.")
    folder: Path | None = Field(None, description="The run folder itself, instead of a new one under root.")
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: go on from the newest checkpoint in folder, if there is one; never: refuse a folder that "
        "has been used.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="The seed of the weights, the tables and the order of the data.")


class TrainSettings(Settings):
    """The training loop."""

    batch_size: int = Field(2048, ge=1, description="Examples per step.")
    epochs: int | None = Field(1, ge=1, description="Passes over the training part; null: as many as steps needs.")
    steps: int | None = Field(None, ge=1, description="Steps to train at most, whatever epochs says.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the dense tower runs; auto: on the GPU where there is one."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of the dense tower on a CPU; null: torch's default, one per core. One is fastest for "
        "small models, above all where other programs run.",
    )
    gradient_clipping: float | None = Field(
        None, gt=0.0, description="The largest norm of the dense tower's gradient; larger ones are scaled down to it."
    )
    evaluation_interval_steps: int | None = Field(
        None, ge=1, description="Steps between evaluations on the validation part; null: after each epoch."
    )
    evaluation_batch_size: int | None = Field(
        None, ge=1, description="Examples per batch of an evaluation; null: batch_size."
    )
    monitor: Literal["auc", "log_loss", "normalized_entropy"] = Field(
        "auc", description="The validation metric that says which evaluation was the best."
    )
    patience: int | None = Field(
        None, ge=1, description="Stop after so many evaluations in a row without a better one; null: never."
    )
    deterministic: bool = Field(
        True, description="Use torch's deterministic kernels, so that the same seed gives the same bits on a GPU too."
    )

    @model_validator(mode="after")
    def _check_the_run_ends(self) -> TrainSettings:
        if self.epochs is None and self.steps is None:
            raise ValueError("one of epochs and steps must be given, or training would never end")
        return self


class LoggingSettings(Settings):
    """What is written down while training."""

    interval_steps: int = Field(50, ge=1, description="Steps between entries in metrics.jsonl and TensorBoard.")
    plain_interval_seconds: float = Field(
        10.0, ge=0.0, description="Seconds between progress lines when the output is not a terminal."
    )
    trace_steps: int | None = Field(
        None,
        ge=1,
        description="Note when each lane of the cache works for so many steps (after the first 20), and write "
        "timeline.json (for ui.perfetto.dev or chrome://tracing) and timeline.png into the run folder.",
    )
    tensorboard: bool = Field(True, description="Write TensorBoard files into the run folder.")


class Config(Settings):
    """All settings of a run."""

    run: RunSettings = Field(default_factory=RunSettings, description="The run and its folder.")
    data: DataSettings = Field(description="The Parquet files and what their columns mean.")
    model: ModelSettings = Field(default_factory=ModelSettings, description="The model.")
    embedding: EmbeddingSettings = Field(default_factory=EmbeddingSettings, description="The embedding tables.")
    dense_optimizer: DenseOptimizerSettings = Field(
        default_factory=DenseOptimizerSettings, description="The optimizer of the dense tower."
    )
    schedules: SchedulesSettings = Field(default_factory=SchedulesSettings, description="The learning-rate schedules.")
    train: TrainSettings = Field(default_factory=TrainSettings, description="The training loop.")
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings, description="Checkpoints.")
    logging: LoggingSettings = Field(default_factory=LoggingSettings, description="Logs.")


def load_config(arguments: Sequence[str]) -> Config:
    """The settings that a command line asks for: ``CONFIG.yaml [--dotted.name value ...]``.

    Raises:
        ConfigError: with a complete message, for whatever is wrong with the file or the overrides.
    """
    positional, overrides = parse_arguments(arguments)
    if len(positional) != 1:
        given = ", ".join(positional) or "none"
        raise ConfigError(f"expected one configuration file, got {given}; see --help")
    path = Path(positional[0])
    tree = read_yaml(path)
    check_keys(Config, tree)
    for key, text in overrides:
        apply_override(Config, tree, key, text)
    return _validate(tree, str(path))


def read_config(path: Path) -> Config:
    """The settings in the YAML file ``path``, such as a run folder's config.yaml.

    Raises:
        ConfigError: with a complete message, for whatever is wrong with the file.
    """
    return load_config([str(path)])


def _validate(tree: dict[str, Any], source: str) -> Config:
    check_keys(Config, tree)
    try:
        return Config(**tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, tree, source)) from error


def dump(config: Config) -> str:
    """``config`` as YAML, every default spelt out; reading it back gives an equal `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted settings in which ``old`` and ``new`` differ, each with its two values; None where it is not set.

    The order of the features counts, for it is the order in the model.
    """
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    return dict(_differences(before, after, ""))


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if old.keys() == new.keys() and list(old) != list(new):
        yield f"{prefix.removesuffix('.')} (order)", (list(old), list(new))
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) or isinstance(after, dict):
            yield from _differences(before or {}, after or {}, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", (before, after)
