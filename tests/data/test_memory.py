"""Reading needs memory for the row groups in flight, whatever the length of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Reads files one after the other, and prints for each the rows and the peak of the process; then leaves in the middle
# of an epoch.
READ = """
import sys
from pathlib import Path
from recsys_offload.data import DataSettings, Encoding, ParquetBatches

for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    settings = DataSettings.model_validate({
        "train": path,
        "dense": {"real": {"transform": "standardize"}},
        "sparse": {f"id_{i}": {"num_embeddings": 10} for i in range(11)},
        "split": {"by": "hash", "shares": {"train": 1, "validation": 0, "test": 0}},
        "shuffle": {"buffer_rows": 60_000},
    })
    batches = ParquetBatches(settings, Encoding.fit(settings), "train", 2048, shuffle=sys.argv[1] == "shuffled")
    rows = sum(map(len, batches))
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(rows, peak.split()[1])
next(iter(batches))
"""


@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_peak_memory_does_not_grow_with_the_file(tmp_path: Path, order: str) -> None:
    random = np.random.default_rng(0)
    rows = 40_000
    columns = {f"id_{i}": random.integers(0, 10, rows) for i in range(11)}
    table = pa.table({"label": random.integers(0, 2, rows), "real": random.random(rows), **columns})
    for name, groups in (("short", 8), ("long", 48)):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            for _ in range(groups):
                writer.write_table(table, row_group_size=rows)
    # The first reading only warms the process up.
    paths = [str(tmp_path / f"{name}.parquet") for name in ("short", "short", "long")]
    result = subprocess.run(
        [sys.executable, "-c", READ, order, *paths], capture_output=True, text=True, check=True, timeout=120
    )
    assert "Traceback" not in result.stderr
    _, (short_rows, short), (long_rows, long) = (map(int, line.split()) for line in result.stdout.splitlines())
    assert (short_rows, long_rows) == (8 * rows, 48 * rows)
    growth, group = long - short, table.nbytes / 1024
    assert growth < 4 * group, (
        f"{short} KiB for 8 row groups, {growth} KiB more for 48; a row group has {group:.0f} KiB"
    )
