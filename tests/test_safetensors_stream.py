"""Safetensors files in chunks: the same bytes as the library's, whatever the strides, and no second copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from recsys_offload import safetensors_stream
from recsys_offload.durable_files import checksum_file
from recsys_offload.safetensors_stream import (
    read_safetensors,
    read_safetensors_header,
    read_safetensors_into,
    write_safetensors,
)

DTYPES = sorted(safetensors_stream._NAMES, key=str)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_agrees_with_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_bits((7, 5), dtype)
    write_safetensors(tmp_path / "ours.safetensors", {"x": tensor}, staging_bytes=24)
    save_file({"x": tensor}, tmp_path / "theirs.safetensors")

    theirs_of_ours = load_file(tmp_path / "ours.safetensors")["x"]
    ours_of_theirs = read_safetensors(tmp_path / "theirs.safetensors")["x"]
    for read in (theirs_of_ours, ours_of_theirs):
        assert read.dtype == dtype and read.shape == tensor.shape
        assert torch.equal(bits(read), bits(tensor))


SHAPES = {
    "scalar": torch.tensor(3.5),
    "no rows": torch.empty(0, 4),
    "no columns": torch.empty(4, 0),
    "one element": torch.randn(1),
    "strided rows": torch.randn(100, 12)[:, 3:7],
    "transposed": torch.randn(9, 31).T,
    "every other row": torch.randn(64, 3)[::2],
    "expanded": torch.randn(5, 1).expand(5, 17),
    "wide rows": torch.randn(3, 500)[:, ::2],
    "four dimensions": torch.randn(3, 4, 5, 6).permute(2, 0, 3, 1),
    "part of a storage": torch.randn(100)[17:53],
    "conjugated": torch.randn(6, 6, dtype=torch.complex64).conj().T,
    "needs a gradient": torch.nn.Parameter(torch.randn(4, 4)),
}


@pytest.mark.parametrize("staging_bytes", [1, 64, 1000, 1 << 20])
def test_any_strides_go_out_and_come_back(tmp_path: Path, staging_bytes: int) -> None:
    path = tmp_path / "x.safetensors"
    checksum = write_safetensors(path, SHAPES, {"note": "hello"}, staging_bytes=staging_bytes)
    assert checksum == checksum_file(path)
    with safe_open(path, "pt") as library:
        assert library.metadata() == {"format": "pt", "note": "hello"}
        assert set(library.keys()) == set(SHAPES)
        for name, tensor in SHAPES.items():
            assert torch.equal(library.get_tensor(name), tensor.detach())

    strided = {name: torch.full((*tensor.shape, 3), 7, dtype=tensor.dtype) for name, tensor in SHAPES.items()}
    read_safetensors_into(path, {name: room[..., 1] for name, room in strided.items()}, staging_bytes=staging_bytes)
    for name, tensor in SHAPES.items():
        assert torch.equal(strided[name][..., 1], tensor.detach())
        assert (strided[name][..., ::2] == 7).all(), "memory beside the tensor was written"


def test_a_subset_can_be_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"a": torch.arange(3), "b": torch.arange(4.0)})
    b = torch.zeros(4)
    read_safetensors_into(tmp_path / "x", {"b": b})
    assert torch.equal(b, torch.arange(4.0))
    assert read_safetensors(tmp_path / "x").keys() == {"a", "b"}


def test_an_empty_file_of_tensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {})
    assert read_safetensors(tmp_path / "x") == {} == load_file(tmp_path / "x")


def test_mixed_types_stay_aligned(tmp_path: Path) -> None:
    tensors = {str(dtype): random_bits((1, 3), dtype) for dtype in DTYPES}
    write_safetensors(tmp_path / "x", tensors)
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in read_safetensors_header(tmp_path / "x").values())
    for name, tensor in load_file(tmp_path / "x").items():
        assert torch.equal(bits(tensor), bits(tensors[name]))


@pytest.mark.parametrize(
    ("room", "message"),
    [
        ({"x": torch.zeros(3, 2)}, r"'x' has shape \[2, 3\] in .*, but \[3, 2\]"),
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, "'x' has type torch.float32 in .*, but torch.float64"),
        ({"y": torch.zeros(2, 3)}, "has no tensor 'y'"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    tmp_path: Path, room: dict[str, torch.Tensor], message: str
) -> None:
    write_safetensors(tmp_path / "f", {"x": torch.ones(2, 3), "z": torch.ones(5)})
    z = torch.zeros(5)
    with pytest.raises(ValueError, match=message):
        read_safetensors_into(tmp_path / "f", {"z": z, **room})
    assert not z.any()


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()])
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="'weight' cannot be saved"):
        write_safetensors(tmp_path / "f", {"weight": tensor})
    assert not list(tmp_path.iterdir())


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f", {"x": torch.ones(4), "y": torch.ones(2, 2)})
    whole = (tmp_path / "f").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut is not a safetensors file, or is damaged"):
            read_safetensors(tmp_path / "cut")


@pytest.mark.parametrize("content", [b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]", b"PK\x03\x04" + b"\0" * 60])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_safetensors(tmp_path / "f")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A real limit of the operating system on the size of files, in a process of its own."""
    path = tmp_path / "f"
    write_safetensors(path, {"x": torch.ones(4)})
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from recsys_offload.safetensors_stream import write_safetensors\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: write_safetensors(Path(sys.argv[1]), {'x': torch.zeros(50_000)}, staging_bytes=30_000)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "File too large"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]
    assert torch.equal(read_safetensors(path)["x"], torch.ones(4))


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Half of a 256 MiB table goes out and comes back: a copy of it would show in the peak of the process."""
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from recsys_offload.safetensors_stream import *\n"
        "table = torch.zeros(1 << 18, 256)\n"
        "table[:, 0] = torch.arange(1 << 18)\n"
        "view, path = table[:, :128], Path(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_safetensors(path, {'weight': view})\n"
        "table[:, :128] = -1\n"
        "read_safetensors_into(path, {'weight': view})\n"
        "assert torch.equal(view[:, 0], torch.arange(float(1 << 18)))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "f")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 64 << 20
