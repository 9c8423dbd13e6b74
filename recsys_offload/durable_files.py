"""Files that are either wholly on the disk or not there at all."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Checksum", "ChecksumWriter", "checksum_file", "durable_file", "durable_path", "fsync_folder", "write_json"]

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Checksum:
    """The size of a file in bytes and the CRC-32 of its content.

    CRC-32 finds every burst error of up to 32 bits, and zlib computes it at several GB/s per core without the
    interpreter lock; a cryptographic hash would make the checkpoint of a large table wait for the processor.
    """

    size: int
    crc32: int


class ChecksumWriter:
    """Writes to an open file and keeps the checksum of all that was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0
        self._crc32 = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; raises the operating system's error where it does not fit."""
        view = memoryview(data).cast("B")
        self._crc32 = zlib.crc32(view, self._crc32)
        self._size += len(view)
        while view:  # an unbuffered file may take less than it was given
            view = view[self._file.write(view) :]

    @property
    def checksum(self) -> Checksum:
        """The checksum of what has been written so far."""
        return Checksum(self._size, self._crc32)


def checksum_file(path: Path) -> Checksum:
    """Read ``path`` in pieces and return its checksum."""
    size, crc32 = 0, 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
            size += count
    return Checksum(size, crc32)


@contextlib.contextmanager
def durable_path(path: Path) -> Iterator[Path]:
    """Write ``path`` so that, whenever the machine stops, the old content or all of the new is found there.

    The block writes and closes a hidden sibling, whose path it is given. When the block ends the sibling is put on the
    disk and takes the name of ``path``. After an error it is removed, and ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        _fsync(temporary, os.O_RDONLY)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[ChecksumWriter]:
    """Write ``path`` as `durable_path` does, through a writer that keeps the checksum."""
    with durable_path(path) as temporary, temporary.open("wb", buffering=0) as file:
        yield ChecksumWriter(file)


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` (created, renamed, removed) survive a power cut."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> Checksum:
    """Write ``content`` as strict JSON (no NaN or infinity) durably; returns the checksum of the file."""
    with durable_file(path) as writer:
        writer.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return writer.checksum
