"""The folder that holds all a run writes: its settings, logs, checkpoints and summary."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from torch.utils.tensorboard import SummaryWriter

from recsys_offload.config import Config, changes, dump, read_config
from recsys_offload.durable_files import durable_file

__all__ = ["RunFolder", "RunFolderError"]

# What does not change the numbers. Where rows are makes no difference to the bit; which kernels compute may.
_HARMLESS_SECTIONS = ("logging.", "checkpoint.", "embedding.placements", "embedding.cache.sizes")
_HARMLESS = {
    "run.name",
    "run.root",
    "run.folder",
    "run.resume",
    "data.read_ahead",
    "data.threads",
    "embedding.threads",
    "embedding.memory_limit",
    "embedding.placement",
    "embedding.device_memory",
    "embedding.look_ahead",
    "embedding.cache.size",
    "embedding.cache.limit",
    "embedding.cache.warm_start",
    "embedding.cache.transfer",
    "train.epochs",
    "train.steps",
    "train.patience",
    "train.evaluation_interval_steps",
}
_LENGTHS = ("train.epochs", "train.steps")


class RunFolderError(ValueError):
    """The run folder cannot be used; the message says which, why, and what to do."""


class RunFolder:
    """An open run folder, locked against a second process. Use it as a context manager.

    Attributes:
        path: the folder.
        config: the settings, with ``run.folder`` filled in; the same as in ``config.yaml``.
    """

    def __init__(self, config: Config) -> None:
        """Make the folder that ``config`` asks for, or open it again.

        Raises:
            RunFolderError: it cannot be written, is in use, belongs to other settings, or holds other files.
        """
        self.path = config.run.folder if config.run.folder is not None else _new_path(config)
        self.config = config.model_copy(update={"run": config.run.model_copy(update={"folder": self.path})})
        with _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            try:
                self._adopt()
            except BaseException:
                self._lock.close()
                raise
        self._tensorboard: SummaryWriter | None = None

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def encoding(self) -> Path:
        """Where the encoding of the columns is."""
        return self.path / "encoding"

    def _adopt(self) -> None:
        saved = self.path / "config.yaml"
        if saved.exists():
            if self.config.run.resume == "never":
                raise RunFolderError(
                    f"the run folder '{self.path}' has been used, and run.resume is never: choose another run.folder, "
                    "or run.resume: auto to go on from its newest checkpoint"
                )
            _refuse_changes(self.path, read_config(saved), self.config)
        else:
            others = sorted(item.name for item in self.path.iterdir() if not item.name.startswith("."))
            if others:
                raise RunFolderError(
                    f"the run folder '{self.path}' is no run's, but holds other files ({', '.join(others[:3])}): "
                    "choose an empty or a new run.folder"
                )
        with durable_file(saved) as file:
            file.write(dump(self.config).encode())

    def start_logs(self, step: int) -> None:
        """Open the logs of a run that goes on from ``step``; what a crashed run logged after it is dropped."""
        with _explained(self.path):
            for outcome in (
                "summary.json",
                "curves.png",
            ):  # of the shorter run, where this one goes on from a finished one
                (self.path / outcome).unlink(missing_ok=True)
            kept = [record for record in self.records() if record["step"] <= step and record["kind"] != "test"]
            with durable_file(self.path / "metrics.jsonl") as file:
                file.write("".join(f"{json.dumps(record)}\n" for record in kept).encode())
            if self.config.logging.tensorboard:
                self._tensorboard = SummaryWriter(str(self.path / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, kind: str, step: int, values: Mapping[str, float | int | None]) -> None:
        """Write one record to metrics.jsonl and TensorBoard; what is not finite becomes null.

        Args:
            kind: ``train``, ``validation`` or ``test``.
        """
        finite = {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
        with _explained(self.path):
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            if self._tensorboard is not None:
                for key, value in finite.items():
                    if value is not None:
                        self._tensorboard.add_scalar(f"{kind}/{key}", value, step)

    def records(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl; a last line that a crash cut short is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records = []
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records

    def close(self) -> None:
        """Flush the logs and let others use the folder."""
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _new_path(config: Config) -> Path:
    base = config.run.root / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def _lock(path: Path) -> BinaryIO:
    """Hold the folder until the file is closed, or the process ends in whatever way."""
    file = (path / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunFolderError(f"the run folder '{path}' is in use by another process") from error
    return file


def _refuse_changes(path: Path, old: Config, new: Config) -> None:
    """Raise where the settings differ in anything that changes the numbers of a resumed run."""
    differing = changes(old, new)
    refused = {
        key: values
        for key, values in differing.items()
        if key not in _HARMLESS and not key.startswith(_HARMLESS_SECTIONS)
    }
    schedules = {"schedules.dense": new.schedules.dense, "schedules.sparse": new.schedules.sparse}
    tied = [key for key, schedule in schedules.items() if schedule.ends_with_the_run]
    lengths = {key: values for key, values in differing.items() if key in _LENGTHS}
    if tied and lengths:
        refused.update(lengths)
    if not refused:
        return
    listed = "\n".join(f"  {key}: {there!r} there, {here!r} now" for key, (there, here) in refused.items())
    if tied and lengths:
        listed += f"\n({', '.join(tied)} decays to the end of the run: with its decay_steps set, the length may change)"
    raise RunFolderError(
        f"the run folder '{path}' was made with other settings:\n{listed}\n"
        "Use the same settings to go on with it, or another run.folder."
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into ones that say what the folder is for."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write the run folder '{path}': {error.strerror or error} ({error.filename or path}). "
            "Choose another with --run.folder or --run.root."
        ) from error
