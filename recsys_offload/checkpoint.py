"""Save a training run and take it up again, to the bit.

One checkpoint is a folder::

    step-000001000/
        manifest.json                            every file with its size and checksum, versions
        dense.safetensors                        the model's state dict without the host tables
        dense_optimizer.{json,safetensors}       the dense optimizer's state dict
        tables/<collection>.<table>.safetensors  weight, and optimizer.<state> of one host table
        state.{json,safetensors}                 step, schedulers, random state, data position, the trainer's notes

Everything is JSON or safetensors; nothing is pickled, so loading a checkpoint runs no code from it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recsys_offload.checkpoint_folder import (
    CheckpointError,
    CheckpointFiles,
    CheckpointSaveError,
    delete_old_checkpoints,
    latest_checkpoint,
    new_checkpoint,
    verify_checkpoint,
)
from recsys_offload.embedding.modules import HostCollection, host_collections
from recsys_offload.random_state import get_random_state, set_random_state
from recsys_offload.safetensors_stream import read_safetensors, read_safetensors_header, read_safetensors_into
from recsys_offload.settings import Settings
from recsys_offload.state_tree import pack, unpack

__all__ = [
    "CheckpointError",
    "CheckpointSaveError",
    "CheckpointSettings",
    "ResumeState",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
]

_JSON_ALLOWANCE_BYTES = 1 << 20


class CheckpointSettings(Settings):
    """When checkpoints are saved and how many stay."""

    interval_steps: int | None = Field(
        None, ge=1, description="Save a checkpoint every so many steps; null saves only at evaluations and at the end."
    )
    keep: int = Field(2, ge=1, description="How many of the newest checkpoints stay, besides the best one.")


@dataclass(frozen=True)
class ResumeState:
    """What a checkpoint hands back to the trainer, after everything else was restored in place.

    Attributes:
        step: how many steps had been trained.
        data: the state dict of the training batches.
        trainer: the trainer's own notes, as it gave them to `save_checkpoint`.
    """

    step: int
    data: dict[str, Any]
    trainer: dict[str, Any]


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    dense_optimizer: Optimizer,
    schedulers: Mapping[str, LRScheduler],
    data: dict[str, Any],
    trainer: dict[str, Any],
    keep: int = 2,
    protect: Collection[Path] = (),
) -> Path:
    """Write the checkpoint of ``step`` into ``folder``, then delete old ones.

    Args:
        folder: the run's ``checkpoints`` folder; made where it is missing.
        data: the position in the training data, JSON-like (tensors are allowed).
        trainer: whatever else the trainer needs to go on, JSON-like (tensors are allowed).
        keep: how many of the newest checkpoints stay, this one included.
        protect: checkpoints that are never deleted, such as the best one.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointSaveError: it could not be written; the checkpoints saved before are untouched.
        TypeError: a state holds something that is neither a tensor nor JSON-like; nothing was written.
    """
    collections = host_collections(model)
    for collection in collections.values():
        collection.flush()  # the newest values of cached rows are on the device
    dense, extra = _dense_state(model, collections)
    optimizer_content, optimizer_tensors = pack(
        {"class": type(dense_optimizer).__name__, "state": dense_optimizer.state_dict()}
    )
    state_content, state_tensors = pack(
        {
            "step": step,
            "schedulers": {name: scheduler.state_dict() for name, scheduler in schedulers.items()},
            "embeddings": {
                path: {"step": collection.tables.step, "optimizer": collection.optimizer.state_dict()}
                for path, collection in collections.items()
            },
            "model_extra_state": extra,
            "random": get_random_state(),
            "data": data,
            "trainer": trainer,
        }
    )
    tables = _table_tensors(collections)
    all_tensors = (dense, optimizer_tensors, state_tensors, *tables.values())
    size = sum(tensor.numel() * tensor.element_size() for group in all_tensors for tensor in group.values())
    with new_checkpoint(folder, step, size + _JSON_ALLOWANCE_BYTES) as files:
        files.add_tensors("dense.safetensors", dense)
        _add_tree(files, "dense_optimizer", optimizer_content, optimizer_tensors)
        for name, tensors in tables.items():
            files.add_tensors(name, tensors)
        _add_tree(files, "state", state_content, state_tensors)
    path = folder / f"step-{step:09d}"
    delete_old_checkpoints(folder, newest=path, keep=keep, protect=protect)
    return path


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    dense_optimizer: Optimizer,
    schedulers: Mapping[str, LRScheduler],
    verify: bool = True,
) -> ResumeState:
    """Restore a checkpoint in place: model, tables, optimizers, schedulers and all random generators.

    Args:
        verify: compare every file with the manifest first; not needed for a path from `latest_checkpoint`.

    Raises:
        CheckpointError: the checkpoint is damaged, or something in it does not fit (the message names the tensor and
            both shapes). Nothing was changed then.
    """
    if verify:
        verify_checkpoint(path)
    collections = host_collections(model)
    state = _read_tree(path, "state")
    optimizer = _read_tree(path, "dense_optimizer")
    _check_names("class of the dense optimizer", path, [optimizer["class"]], [type(dense_optimizer).__name__])
    _check_names("schedulers", path, state["schedulers"], schedulers)
    _load_model(path, model, _table_tensors(collections), state["model_extra_state"], weights_only=False)
    dense_optimizer.load_state_dict(optimizer["state"])
    for name, collection in collections.items():
        collection.tables.step = state["embeddings"][name]["step"]
        collection.optimizer.load_state_dict(state["embeddings"][name]["optimizer"])
    for name, scheduler in schedulers.items():
        scheduler.load_state_dict(state["schedulers"][name])
    set_random_state(state["random"])
    return ResumeState(step=state["step"], data=state["data"], trainer=state["trainer"])


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into ``model`` (dense part and host tables), without any optimizer's state.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit ``model``. Nothing was changed then.
    """
    verify_checkpoint(path)
    tables = _table_tensors(host_collections(model))
    weights = {name: {"weight": tensors["weight"]} for name, tensors in tables.items()}
    _load_model(path, model, weights, _read_tree(path, "state")["model_extra_state"], weights_only=True)


def _dense_state(
    model: nn.Module, collections: Mapping[str, HostCollection]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's state dict without the host tables: its tensors, and its other values (modules' extra state)."""
    tables = {
        f"{path}.{collection.table_prefix}.{table}.weight".removeprefix(".")
        for path, collection in collections.items()
        for table in collection.tables.names
    }
    state = {key: value for key, value in model.state_dict().items() if key not in tables}
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def _table_tensors(collections: Mapping[str, HostCollection]) -> dict[str, dict[str, Tensor]]:
    """For every host table, by the name of its file, the tensors in the file: views of the table's memory."""
    return {
        _table_file(path, table): {
            "weight": collection.tables.weight(table),
            **{f"optimizer.{key}": value for key, value in collection.tables.optimizer_state(table).items()},
        }
        for path, collection in collections.items()
        for table in collection.tables.names
    }


def _table_file(collection: str, table: str) -> str:
    """Table names may hold any character; with their dots quoted too, two tables never share a file."""
    name = f"{collection}.{quote(table, safe='').replace('.', '%2E')}".removeprefix(".")
    return f"tables/{name}.safetensors"


def _load_model(
    path: Path,
    model: nn.Module,
    tables: Mapping[str, Mapping[str, Tensor]],
    extra_state: Mapping[str, Any],
    *,
    weights_only: bool,
) -> None:
    """Compare everything with what is there, then fill ``tables`` and the dense part of ``model``."""
    collections = host_collections(model)
    dense, extra = _dense_state(model, collections)
    saved_tables = [f"tables/{file.name}" for file in (path / "tables").glob("*.safetensors")]
    _check_names("host tables", path, saved_tables, tables)
    for name, tensors in tables.items():
        _check_tensors(path / name, tensors, allow_more=weights_only)
    _check_tensors(path / "dense.safetensors", dense)
    _check_names("extra state of modules", path, extra_state, extra)

    for collection in collections.values():
        collection.flush()  # loading weights alone leaves the optimizer's state as it is
    for name, tensors in tables.items():
        read_safetensors_into(path / name, tensors)
    for collection in collections.values():
        collection.reload()
    # Not strict: the names were compared above, and the tables, already filled, are not among them.
    model.load_state_dict({**read_safetensors(path / "dense.safetensors"), **extra_state}, strict=False)


def _check_tensors(path: Path, expected: Mapping[str, Tensor], *, allow_more: bool = False) -> None:
    saved = read_safetensors_header(path)
    _check_names("tensors", path, [name for name in saved if name in expected or not allow_more], expected)
    for name, tensor in expected.items():
        if saved[name].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"tensor '{name}' has shape {list(saved[name].shape)} in {path}, but {list(tensor.shape)} in the "
                "model; load it with the settings it was trained with"
            )
        if saved[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"tensor '{name}' has type {saved[name].dtype} in {path}, but {tensor.dtype} in the "
                "model; load it with the settings it was trained with"
            )


def _check_names(what: str, path: Path, saved: Iterable[str], expected: Iterable[str]) -> None:
    only_saved, only_here = sorted(set(saved) - set(expected)), sorted(set(expected) - set(saved))
    if only_saved or only_here:
        raise CheckpointError(
            f"the {what} in {path} are not those of this run: only in the checkpoint {only_saved}, only in this run "
            f"{only_here}; load it with the settings it was trained with"
        )


def _add_tree(files: CheckpointFiles, name: str, content: Any, tensors: Mapping[str, Tensor]) -> None:
    files.add_tensors(f"{name}.safetensors", tensors)
    files.add_json(f"{name}.json", content)


def _read_tree(path: Path, name: str) -> dict[str, Any]:
    tensors = read_safetensors(path / f"{name}.safetensors")
    return unpack(json.loads((path / f"{name}.json").read_bytes()), tensors)
