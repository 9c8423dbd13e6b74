"""Checkpoints: every bit comes back, and no crash, damage or full disk costs more than the checkpoint being written."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointSettings,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from recsys_offload.embedding.config import SparseOptimizerSettings
from recsys_offload.embedding.modules import HostEmbeddingBagCollection

DENSE_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW([{"params": list(p), "weight_decay": 0.1}], lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "tensor_rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], milestones=[3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
}


class ExtraState(nn.Module):
    """Keeps a number in the state dict, as modules may."""

    seen = 0

    def forward(self, values: Tensor) -> Tensor:
        return values

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Run:
    """A model with two host tables and a dense part, trained on random numbers from the global generators."""

    def __init__(
        self, dense: str = "adam", sparse: str = "adagrad", scheduler: str = "lambda", seed: int = 0, rows: int = 50
    ) -> None:
        torch.manual_seed(seed)
        tables = [
            EmbeddingBagConfig(name="user.id/ü", embedding_dim=3, num_embeddings=rows, feature_names=["user"]),
            EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=7, feature_names=["item"]),
        ]
        self.tables = HostEmbeddingBagCollection(tables, optimizer=SparseOptimizerSettings(name=sparse), seed=seed)
        self.model = nn.Module()
        self.model.sparse = nn.ModuleDict({"collection": self.tables})
        self.model.over = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1), ExtraState())
        self.optimizer = DENSE_OPTIMIZERS[dense](self.model.over.parameters())
        self.schedulers = {
            "dense": SCHEDULERS[scheduler](self.optimizer),
            "sparse": lr_scheduler.ExponentialLR(self.tables.optimizer, 0.9),
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            noise = torch.from_numpy(np.random.rand(6, 4).astype(np.float32))
            loss = self.model.over(torch.randn(6, 4) + noise * random.random()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.tables.optimizer.step()
            for scheduler in self.schedulers.values():
                if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(loss.item())
                else:
                    scheduler.step()
            for name in self.tables.tables.names:
                for tensor in self.host_tensors(name).values():
                    tensor += torch.randn(tensor.shape) * self.tables.optimizer.param_groups[0]["lr"]
            self.tables.tables.step += 1
            self.model.over[3].seen += 1

    def host_tensors(self, name: str) -> dict[str, Tensor]:
        return {"weight": self.tables.tables.weight(name), **self.tables.tables.optimizer_state(name)}

    def save(self, folder: Path, step: int = 1, **options: Any) -> Path:
        return save_checkpoint(folder, **{**self.parts(), "step": step, "data": {"row": step}, "trainer": {}} | options)

    def load(self, path: Path) -> Any:
        return load_checkpoint(path, **self.parts())

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "dense_optimizer": self.optimizer, "schedulers": self.schedulers}

    def everything(self) -> dict[str, Any]:
        return {
            "dense": dict(self.model.over.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "sparse_optimizer": self.tables.optimizer.state_dict(),
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
            "tables": {name: self.host_tensors(name) for name in self.tables.tables.names},
            "step": self.tables.tables.step,
            "random": (random.getstate(), list(np.random.get_state()[1]), torch.get_rng_state()),
        }


def assert_same_bits(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_bits(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("dense", "sparse", "scheduler"),
    [
        ("sgd", "sgd", "lambda"),
        ("momentum", "rowwise_adagrad", "sequence"),
        ("adam", "adam", "plateau"),
        ("adamw", "adagrad", "milestones"),
        ("adagrad", "adagrad", "sequence"),
        ("tensor_rate", "adam", "lambda"),
        ("momentum", "sgd", "one_cycle"),
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, dense: str, sparse: str, scheduler: str
) -> None:
    run = Run(dense, sparse, scheduler)
    run.train(5)
    path = run.save(tmp_path, 5, data={"epoch": 1, "row": 77}, trainer={"best": 0.1 + 0.2, "history": [1, None]})
    run.train(4)

    resumed = Run(dense, sparse, scheduler, seed=1)
    resumed.train(1)
    state = resumed.load(path)
    assert (state.step, state.data, state.trainer) == (
        5,
        {"epoch": 1, "row": 77},
        {"best": 0.1 + 0.2, "history": [1, None]},
    )
    resumed.train(4)
    expected = run.everything()
    assert_same_bits(resumed.everything() | {"random": None}, expected | {"random": None})


def test_random_state_comes_back(tmp_path: Path) -> None:
    run = Run()
    torch.randn(3), np.random.normal(), random.gauss(0, 1)
    path = run.save(tmp_path)
    drawn = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.randn(20).tolist()]
    run.load(path)
    assert drawn == [
        random.gauss(0, 1),
        random.random(),
        np.random.normal(),
        np.random.rand(),
        torch.randn(20).tolist(),
    ]


def test_saving_and_loading_leave_the_random_state_alone_elsewhere(tmp_path: Path) -> None:
    run = Run()
    before = run.everything()
    run.save(tmp_path)
    assert_same_bits(run.everything(), before)


def test_the_files_are_what_other_tools_read(tmp_path: Path) -> None:
    run = Run(sparse="adagrad")
    run.train(2)
    path = run.save(tmp_path, 1000)
    assert path.name == "step-000001000"
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    user = "tables/sparse.collection.user%2Eid%2F%C3%BC.safetensors"
    assert names == {
        "manifest.json",
        "dense.safetensors",
        "dense_optimizer.json",
        "dense_optimizer.safetensors",
        "state.json",
        "state.safetensors",
        "tables/sparse.collection.item.safetensors",
        user,
    }
    table = load_file(path / user)
    assert torch.equal(table["weight"], run.tables.tables.weight("user.id/ü"))
    assert torch.equal(table["optimizer.sum"], run.tables.tables.optimizer_state("user.id/ü")["sum"])
    dense = load_file(path / "dense.safetensors")
    assert dense.keys() == {f"over.{key}" for key in run.model.over.state_dict()} - {"over.3._extra_state"}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 1000 and manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["files"]) == names - {"manifest.json"}
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == (path / name).stat().st_size


def test_weights_alone_load_into_a_model_with_another_optimizer(tmp_path: Path) -> None:
    run = Run(sparse="adam")
    run.train(2)
    path = run.save(tmp_path)
    other = Run(sparse="sgd", seed=3)
    load_weights(path, other.model)
    assert_same_bits(other.everything()["dense"], run.everything()["dense"])
    for name in run.tables.tables.names:
        assert torch.equal(other.tables.tables.weight(name), run.tables.tables.weight(name))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rows": 51}, r"'weight' has shape \[50, 3\] in .*user.*, but \[51, 3\] in the model"),
        ({"sparse": "sgd"}, r"only in the checkpoint \['optimizer.sum'\]"),
        ({"sparse": "rowwise_adagrad"}, r"'optimizer.sum' has shape \[50, 3\] in .*, but \[50\] in the model"),
        (
            {"dense": "sgd"},
            r"class of the dense optimizer.*only in the checkpoint \['Adam'\], only in this run \['SGD'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    path = Run().save(tmp_path)
    run = Run(seed=1, **other)
    before = run.everything()
    with pytest.raises(CheckpointError, match=message):
        run.load(path)
    assert_same_bits(run.everything(), before)


def test_another_dense_model_is_refused_by_tensor_name_and_shapes(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    run = Run()
    run.model.over[0] = nn.Linear(6, 5)
    with pytest.raises(CheckpointError, match=r"'over.0.weight' has shape \[5, 4\] in .*, but \[5, 6\] in the model"):
        load_weights(path, run.model)
    run.model.over[0] = nn.Linear(4, 5).double()
    with pytest.raises(CheckpointError, match=r"'over.0.weight' has type torch.float32 in .*, but torch.float64"):
        load_weights(path, run.model)
    run.model.over[0] = nn.Identity()
    with pytest.raises(CheckpointError, match=r"only in the checkpoint \['over.0.bias', 'over.0.weight'\]"):
        load_weights(path, run.model)


def test_state_that_would_need_pickle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'trainer\.hook'"):
        Run().save(tmp_path / "checkpoints", trainer={"hook": print})
    assert not (tmp_path / "checkpoints").exists()


def test_keep_deletes_the_oldest_but_not_what_is_protected(tmp_path: Path) -> None:
    run = Run()
    best = run.save(tmp_path, 1)
    for step in range(2, 7):
        run.save(tmp_path, step, keep=2, protect={best})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-000000005", "step-000000006"]
    run.save(tmp_path, 3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"], "the one just saved must stay"


def test_settings_are_checked() -> None:
    assert CheckpointSettings().keep >= 1
    for wrong in ({"keep": 0}, {"interval_steps": 0}, {"every": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CheckpointSettings(**wrong)


# ---------------------------------------------------------------------------------------------------- damage


def test_any_damage_to_the_newest_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    previous, newest = run.save(tmp_path, 1), run.save(tmp_path, 2)
    whole = tmp_path / "copy"
    shutil.copytree(newest, whole)
    for file in sorted(file for file in whole.rglob("*") if file.is_file()):
        content = file.read_bytes()
        damaged = newest / file.relative_to(whole)
        cuts = {0, 1, len(content) // 2, len(content) - 2}
        versions = [content[:cut] for cut in cuts] + [None]
        if file.name != "manifest.json":
            middle = len(content) // 2
            versions.append(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
            versions.append(content + b"\0")
        for version in versions:
            if version is None:
                damaged.unlink()
            else:
                damaged.write_bytes(version)
            caplog.clear()
            assert latest_checkpoint(tmp_path) == previous
            assert damaged.name in caplog.text
            with pytest.raises(CheckpointError, match=damaged.name):
                run.load(newest)
        damaged.write_bytes(content)
        assert latest_checkpoint(tmp_path) == newest


def test_when_all_are_damaged_it_does_not_start_over_in_silence(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    (path / "dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        latest_checkpoint(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    run = Run()
    path = run.save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="version 99; this program reads"):
        run.load(path)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / ".saving-step-000000001").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


# ---------------------------------------------------------------------------------------------------- full disk


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    first = run.save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1234, 1234))
    with pytest.raises(
        CheckpointSaveError, match=rf"step 2 in {tmp_path}: it needs about [\d,]+ bytes, 1,234 are free"
    ) as info:
        run.save(tmp_path, 2, keep=1)
    assert info.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == [first] and latest_checkpoint(tmp_path) == first


def test_a_disk_that_fills_up_while_saving(tmp_path: Path) -> None:
    """The operating system's own limit on the size of a file makes real writes fail, in files of every size."""
    run = Run()
    previous = run.save(tmp_path, 1)
    sizes = {file.stat().st_size for file in previous.rglob("*") if file.is_file()}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in sorted(sizes):
        with pytest.raises(CheckpointSaveError) as info:
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, unlimited[1]))
                run.save(tmp_path, 2)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert str(info.value).startswith(f"no room for the checkpoint of step 2 in {tmp_path}: it needs about")
        assert "(File too large). The checkpoints saved before are untouched." in str(info.value)
        assert list(tmp_path.iterdir()) == [previous] and latest_checkpoint(tmp_path) == previous


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(
        CheckpointSaveError, match=r"cannot save the checkpoint of step 1 in .*checkpoints: .*File exists"
    ):
        Run().save(tmp_path / "checkpoints")


# ---------------------------------------------------------------------------------------------------- crashes


def test_a_crash_at_any_point_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    """Processes that exit at once at every write, fsync, rename and removal of a save. See the script below."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", CRASH, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    for points in result.stdout.split():
        assert int(points) > 30, "the script must have met the points where it can crash"


CRASH = """
import os, pathlib, shutil, sys
from pathlib import Path
from recsys_offload.durable_files import ChecksumWriter
from test_checkpoint import Run, latest_checkpoint

os.fsync = lambda descriptor: None  # the machine goes on, so what was written is there without it
base = Path(sys.argv[1])
old, new, reader = Run(seed=0), Run(seed=1), Run(seed=2)
old.save(base / "start", 1, keep=1, trainer={"who": "old"})


def save_and_crash(folder, step, crash_at):
    calls = 0

    def point():
        nonlocal calls
        calls += 1
        if calls == crash_at:
            os._exit(77)

    def crashing(function):
        def call(*arguments, **options):
            point()
            return function(*arguments, **options)

        return call

    def write_half(writer, data, write=ChecksumWriter.write):
        half = len(data) // 2
        write(writer, data[:half])
        point()
        write(writer, data[half:])

    ChecksumWriter.write = write_half
    places = {os: ("fsync", "unlink", "rmdir"), Path: ("rename", "replace", "mkdir")}
    for owner, name in [(owner, name) for owner, names in places.items() for name in names]:
        setattr(owner, name, crashing(getattr(owner, name)))
    new.save(folder, step, keep=1, trainer={"who": "new"})


for step in (1, 2):  # saved anew, and the next one
    found = []
    for crash_at in range(1, 1000):
        folder = base / str(crash_at)
        shutil.copytree(base / "start", folder)
        child = os.fork()
        if child == 0:
            try:
                save_and_crash(folder, step, crash_at)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 77), code
        state = reader.load(latest_checkpoint(folder))
        found.append(state.trainer["who"])
        expected = old if found[-1] == "old" else new
        for name in expected.tables.tables.names:
            for key, tensor in expected.host_tensors(name).items():
                assert reader.host_tensors(name)[key].equal(tensor)
        new.save(folder, step + 1, keep=1)
        assert [path.name for path in folder.iterdir()] == [f"step-{step + 1:09d}"], "leftovers of the crash must go"
        shutil.rmtree(folder)
        if code == 0:
            break
    assert found == sorted(found, reverse=True) and set(found) == {"old", "new"}, found
    print(len(found))
"""


def test_everything_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut would need: each file and folder synchronised before the rename, the parent after it."""
    synced: set[Path] = set()
    at_rename: list[set[Path]] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> Path:
        at_rename.append(set(synced))
        synced.clear()
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    path = Run().save(tmp_path / "checkpoints")
    saving = path.with_name(f".saving-{path.name}")
    files = {file.relative_to(path) for file in path.rglob("*") if file.is_file()}
    (before,) = at_rename
    assert {saving / file.parent / f".{file.name}.tmp" for file in files} <= before
    assert {saving, saving / "tables", tmp_path} <= before
    assert synced == {path.parent}
