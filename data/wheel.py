"""What the data scripts share: a wheel fetched from PyPI and verified, and a Parquet file that is whole or absent."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq


@contextlib.contextmanager
def open_wheel(requirement: str, sha256: str) -> Iterator[zipfile.ZipFile]:
    """Downloads a wheel with pip into a temporary folder and opens it once its SHA-256 is as expected.

    Args:
        requirement: such as ``recbole==1.2.1``.
        sha256: of the wheel, as PyPI publishes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The stated wheel holds no compiled code and nothing of it is run, so the Python that pip sees is irrelevant.
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, requirement]
        if subprocess.run(command).returncode != 0:
            sys.exit(
                f"error: pip could not download {requirement} (its message is above). This needs PyPI, or a mirror "
                f"that pip is configured for, once. Without a network: get the wheel on a machine that has one "
                f"(python -m pip download --no-deps {requirement}), copy it here, and run this again with "
                "PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder of the wheel>."
            )
        (wheel,) = Path(folder).glob("*.whl")
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != sha256:
            sys.exit(
                f"error: {wheel.name} has SHA-256 {found}, not {sha256}. The index that pip uses serves another file: "
                "clear pip's cache (pip cache purge), and check pip's index-url."
            )
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def read_delimited(
    archive: zipfile.ZipFile, member: str, rows: int, types: dict[str, pa.DataType], delimiter: str = ","
) -> pa.Table:
    """Reads the columns named in ``types`` of a delimited text file with a header line.

    Args:
        rows: how many rows the file must have.
        types: column -> type; the header's name, up to a colon where it has one. An empty text is a null.
    """
    header, _, body = archive.read(member).partition(b"\n")
    names = [name.partition(":")[0] for name in header.decode().rstrip("\r").split(delimiter)]
    table = csv.read_csv(
        pa.BufferReader(body),
        csv.ReadOptions(column_names=names),
        csv.ParseOptions(delimiter=delimiter, quote_char='"' if delimiter == "," else False),
        csv.ConvertOptions(column_types=types, include_columns=list(types), strings_can_be_null=True, null_values=[""]),
    )
    if table.num_rows != rows:
        sys.exit(f"error: {member} in {archive.filename} has {table.num_rows} rows, not {rows}")
    return table


def is_complete(path: Path, schema: pa.Schema, rows: int) -> bool:
    """Whether ``path`` is a Parquet file with this schema and number of rows."""
    try:
        metadata = pq.ParquetFile(path)
    except (FileNotFoundError, pa.ArrowInvalid):
        return False
    return metadata.metadata.num_rows == rows and metadata.schema_arrow.equals(schema)


def build_once(path: Path, schema: pa.Schema, rows: int, build: Callable[[], pa.Table]) -> None:
    """Makes ``path`` from the table that ``build`` returns, unless it is there already.

    Of several processes that ask at once, one builds and the others wait. The file is whole or absent, whenever the
    process or the machine stops.
    """
    if is_complete(path, schema, rows):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(path, schema, rows):
            return
        table = build().select(schema.names).cast(schema)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                pq.write_table(table, file, compression="zstd", row_group_size=16384)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    print(f"Wrote {path} ({table.num_rows:,} rows)")
