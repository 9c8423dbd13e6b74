"""Safetensors files written and read in chunks, from and into tensors of any stride.

The safetensors library wants contiguous tensors, so it would copy a table whose rows lie beside their optimizer
state: as much memory again as the table has. Here a bounded staging buffer is the only extra memory. The files are
ordinary safetensors files: eight bytes with the length of the header, the header in JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from recsys_offload.durable_files import Checksum, durable_file

__all__ = [
    "TensorEntry",
    "read_safetensors",
    "read_safetensors_header",
    "read_safetensors_into",
    "write_safetensors",
]

STAGING_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

if sys.byteorder != "little":
    raise ImportError("safetensors files are little-endian, and so must be the machine that uses this module")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its type, its shape, and its bytes ``[begin, end)`` counted from the file's first."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> Checksum:
    """Write ``tensors`` (any strides, any device) to ``path`` durably and atomically.

    Args:
        metadata: text to keep in the header.
        staging_bytes: the most memory used beside the tensors.

    Returns:
        The size and checksum of the file.

    Raises:
        TypeError: a tensor is not dense, or its type has no name in the format.
        OSError: the file cannot be written; ``path`` is then as it was.
    """
    ordered = _check(tensors)
    with durable_file(path) as writer:
        writer.write(_header(ordered, metadata or {}))
        staging = torch.empty(_staging_size(ordered.values(), staging_bytes), dtype=torch.uint8)
        staging_view = staging.numpy().data
        for tensor in ordered.values():
            for chunk in _chunks(tensor.detach(), staging_bytes):
                size = chunk.numel() * chunk.element_size()
                staging[:size].view(chunk.dtype).view(chunk.shape).copy_(chunk)
                writer.write(staging_view[:size])
    return writer.checksum


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that ``path`` holds, by name.

    Raises:
        ValueError: the file is cut short or is not a safetensors file.
    """
    with path.open("rb", buffering=0) as file:
        return _read_header(file, path)


def read_safetensors_into(path: Path, tensors: Mapping[str, Tensor], *, staging_bytes: int = STAGING_BYTES) -> None:
    """Fill ``tensors`` (any strides, any device) in place with the tensors of the same names in ``path``.

    Tensors of the file that are not asked for are skipped.

    Raises:
        ValueError: a tensor is missing, or differs in shape or type (nothing is changed then); or the file is broken.
    """
    with path.open("rb", buffering=0) as file:
        entries = _read_header(file, path)
        for name, tensor in tensors.items():
            _check_entry(path, name, entries.get(name), tensor)
        staging = torch.empty(_staging_size(tensors.values(), staging_bytes), dtype=torch.uint8)
        staging_view = staging.numpy().data
        for name, tensor in tensors.items():
            file.seek(entries[name].begin)
            for chunk in _chunks(tensor.detach(), staging_bytes):
                size = chunk.numel() * chunk.element_size()
                _read_exactly(file, staging_view[:size], path)
                chunk.copy_(staging[:size].view(chunk.dtype).view(chunk.shape))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of ``path`` in memory of their own (the library's would stay mapped to the file)."""
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in read_safetensors_header(path).items()
    }
    read_safetensors_into(path, tensors)
    return tensors


def _check(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order of the file: wide types first, so that every tensor is aligned."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
            raise TypeError(
                f"tensor '{name}' cannot be saved: safetensors has no {tensor.dtype} with layout {tensor.layout}"
            )
        if name == "__metadata__":
            raise TypeError("a tensor cannot be named '__metadata__': the safetensors format keeps its notes there")
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: FileIO, path: Path) -> dict[str, TensorEntry]:
    broken = f"{path} is not a safetensors file, or is damaged"
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError(f"{broken}: it has no readable header")
    text = file.read(length)
    try:
        content: dict[str, dict] = json.loads(text)
        content.pop("__metadata__", None)
        start = 8 + length
        entries = {}
        for name, item in content.items():
            begin, end = item["data_offsets"]
            entries[name] = TensorEntry(_DTYPES[item["dtype"]], tuple(item["shape"]), start + begin, start + end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{broken}: its header does not parse ({error})") from error
    file.seek(0, 2)
    size = file.tell()
    for name, entry in entries.items():
        expected = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.end - entry.begin != expected or not start <= entry.begin <= entry.end <= size:
            raise ValueError(f"{broken}: tensor '{name}' does not fit into its {size} bytes")
    return entries


def _check_entry(path: Path, name: str, entry: TensorEntry | None, tensor: Tensor) -> None:
    if entry is None:
        raise ValueError(f"{path} has no tensor '{name}'")
    if entry.shape != tuple(tensor.shape):
        raise ValueError(f"tensor '{name}' has shape {list(entry.shape)} in {path}, but {list(tensor.shape)} here")
    if entry.dtype != tensor.dtype:
        raise ValueError(f"tensor '{name}' has type {entry.dtype} in {path}, but {tensor.dtype} here")


def _staging_size(tensors: Iterable[Tensor], limit: int) -> int:
    largest = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
    return min(largest, max(limit, 16))  # one element must fit


def _chunks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views that cover ``tensor`` in row-major order, each of at most ``limit`` bytes (or one element)."""
    if tensor.numel() == 0:
        return
    size = tensor.numel() * tensor.element_size()
    if size <= limit or tensor.numel() == 1:
        yield tensor
        return
    rows = limit // (size // tensor.shape[0])
    if rows == 0:
        for row in tensor:
            yield from _chunks(row, limit)
    else:
        yield from tensor.split(rows)


def _read_exactly(file: FileIO, buffer: memoryview, path: Path) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise ValueError(f"{path} ended early: it was cut short while it was being read")
        buffer = buffer[count:]
