"""Reading needs memory for the row groups in flight, whatever the length of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

READ = """
import resource, sys
from recsys_offload.data import DataSettings, Encoding, ParquetBatches
settings = DataSettings.model_validate({
    "train": sys.argv[1],
    "dense": {"real": {}},
    "sparse": {f"id_{i}": {"num_embeddings": 10} for i in range(20)},
    "shuffle": {"buffer_rows": 60_000},
})
encoding = Encoding.fit(settings)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = sum(len(b) for b in ParquetBatches(settings, encoding, "train", 2048, shuffle=sys.argv[2] == "shuffle"))
print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak_growth(path: Path, how: str) -> tuple[int, int]:
    """Rows read, and by how many KiB the peak of the process rose while it read them."""
    result = subprocess.run(
        [sys.executable, "-c", READ, str(path), how], capture_output=True, text=True, check=True, timeout=120
    )
    rows, growth = result.stdout.split()
    return int(rows), int(growth)


def test_peak_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = 50_000
    columns = {f"id_{i}": random.integers(0, 10, rows) for i in range(20)}
    table = pa.table({"label": random.integers(0, 2, rows), "real": random.random(rows), **columns})
    group_kib = table.nbytes / 1024
    for name, groups in (("short", 12), ("long", 36)):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            for _ in range(groups):
                writer.write_table(table, row_group_size=rows)
    for how in ("in order", "shuffle"):
        short_rows, short = peak_growth(tmp_path / "short.parquet", how)
        long_rows, long = peak_growth(tmp_path / "long.parquet", how)
        assert (short_rows, long_rows) == (12 * rows, 36 * rows)
        assert long < short + 4 * group_kib, f"{how}: {short} KiB for 12 row groups, {long} KiB for 36"
