"""The folder of checkpoints: complete ones only, whatever happens while one is written or deleted.

A checkpoint is written under a hidden name, ``.saving-step-...``, and renamed to ``step-...`` when all of its files
are on the disk. One that goes is first renamed to ``.deleting-step-...``. Where a step is saved anew, the older
checkpoint waits as ``.replaced-step-...``, and still counts as one, until its successor has taken the name.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import logging
import platform
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from recsys_offload.durable_files import Checksum, checksum_file, fsync_folder, write_json
from recsys_offload.safetensors_stream import write_safetensors

__all__ = [
    "CheckpointError",
    "CheckpointFiles",
    "CheckpointSaveError",
    "delete_old_checkpoints",
    "latest_checkpoint",
    "new_checkpoint",
    "verify_checkpoint",
]

FORMAT = "recsys_offload checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_STEP_NAME = re.compile(r"(?:\.replaced-)?step-(\d+)")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_VERIFY_THREADS = 4
_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not fit what it is loaded into."""


class CheckpointSaveError(OSError):
    """A checkpoint could not be written; those saved before are as they were."""


class CheckpointFiles:
    """The files of a checkpoint that is being written; keeps the manifest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checksums: dict[str, Checksum] = {}

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write the safetensors file ``name`` (a path relative to the checkpoint)."""
        self._checksums[name] = write_safetensors(self._path(name), tensors, metadata)

    def add_json(self, name: str, content: Any) -> None:
        """Write the JSON file ``name`` (a path relative to the checkpoint)."""
        self._checksums[name] = write_json(self._path(name), content)

    def finish(self, step: int) -> None:
        """Write the manifest, after which the folder is complete."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": step,
            "versions": _versions(),
            "files": {
                name: {"bytes": checksum.size, "crc32": f"{checksum.crc32:08x}"}
                for name, checksum in self._checksums.items()
            },
        }
        write_json(self._folder / MANIFEST, content)
        fsync_folder(self._folder)

    def _path(self, name: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextlib.contextmanager
def new_checkpoint(folder: Path, step: int, size: int) -> Iterator[CheckpointFiles]:
    """Write the checkpoint ``step-<step>`` in ``folder``: it appears when the block ends, complete, or not at all.

    Args:
        size: about how many bytes it will take; whether they are free is checked before anything is written.

    Raises:
        CheckpointSaveError: there is no room, or the folder cannot be written to.
    """
    target = folder / f"step-{step:09d}"
    saving, replaced = folder / f".saving-{target.name}", folder / f".replaced-{target.name}"
    try:
        _make_folder(folder)
        _tidy(folder)
        _check_room(folder, step, size)
        saving.mkdir()
        files = CheckpointFiles(saving)
        yield files
        files.finish(step)
        if target.exists():
            target.rename(replaced)
            fsync_folder(folder)
        saving.rename(target)
        fsync_folder(folder)
    except CheckpointSaveError:
        raise
    except BaseException as error:
        shutil.rmtree(saving, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        if error.errno in _NO_ROOM:
            raise _no_room(folder, step, size, error) from error
        raise CheckpointSaveError(f"cannot save the checkpoint of step {step} in {folder}: {error}") from error
    _tidy(folder)


def delete_old_checkpoints(folder: Path, *, newest: Path, keep: int, protect: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints of ``folder`` beyond ``keep``, but never ``newest`` or those in ``protect``."""
    kept = {newest.resolve(), *(path.resolve() for path in protect)}
    others = [path for path in _checkpoints(folder) if path != newest]
    for path in others[keep - 1 :]:
        if path.resolve() not in kept:
            deleting = folder / f".deleting-{path.name}"
            path.rename(deleting)
            shutil.rmtree(deleting)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, all of its files verified; None where none was ever finished.

    A damaged one is passed over with a warning.

    Raises:
        CheckpointError: there are checkpoints, but every one is damaged.
    """
    candidates = _checkpoints(folder)
    for path in candidates:
        try:
            verify_checkpoint(path)
            return path
        except CheckpointError as error:
            _log.warning("passing over a damaged checkpoint: %s", error)
    if candidates:
        raise CheckpointError(f"every checkpoint in {folder} is damaged; move them away to start from the beginning")
    return None


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Read every file of the checkpoint ``path`` and compare it with the manifest, which is returned.

    Raises:
        CheckpointError: a file is missing, cut short or changed, or the format is not known.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        listed = {
            name: Checksum(int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in manifest["files"].items()
        }
        name_of_format, version = manifest["format"], manifest["format_version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable {MANIFEST} ({type(error).__name__}: {error})") from error
    if (name_of_format, version) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{path} is a '{name_of_format}' of version {version}; "
            f"this program reads '{FORMAT}' of version {FORMAT_VERSION}"
        )
    with ThreadPoolExecutor(_VERIFY_THREADS) as pool:
        for _ in pool.map(lambda item: _verify_file(path / item[0], item[1]), listed.items()):
            pass
    return manifest


def _verify_file(path: Path, expected: Checksum) -> None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CheckpointError(f"{path} has {size} bytes, but was saved with {expected.size}")
        found = checksum_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if found != expected:
        raise CheckpointError(f"{path} was changed after it was saved: its checksum differs from the manifest")


def _checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of ``folder``, newest first."""
    if not folder.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # ".replaced-step-1" comes before "step-1", which overrides it
        match = _STEP_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found, reverse=True)]


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        fsync_folder(folder.parent)


def _tidy(folder: Path) -> None:
    """Remove what a crash has left of an unfinished save or deletion."""
    for path in folder.iterdir():
        replaced = path.name.startswith(".replaced-")
        successor = folder / path.name.removeprefix(".replaced-")
        if replaced and not successor.exists():
            path.rename(successor)
        elif replaced or path.name.startswith((".saving-", ".deleting-")):
            shutil.rmtree(path)


def _check_room(folder: Path, step: int, size: int) -> None:
    if size > shutil.disk_usage(folder).free:
        raise _no_room(folder, step, size, None)


def _no_room(folder: Path, step: int, size: int, cause: OSError | None) -> CheckpointSaveError:
    free = shutil.disk_usage(folder).free
    error = CheckpointSaveError(
        f"no room for the checkpoint of step {step} in {folder}: it needs about {size:,} bytes, {free:,} are free"
        f"{f' ({cause.strerror})' if cause else ''}. The checkpoints saved before are untouched. "
        "Free some space, set checkpoint.keep lower or choose a run folder on a larger disk."
    )
    error.errno = cause.errno if cause else errno.ENOSPC
    return error


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("recsys-offload", "torch", "torchrec", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
