"""Does the cache hold its memory over a long run? 20,000 tiny batches through a cache of 5% of the rows.

    python benchmarks/soak.py

Counts what could leak, after a quarter of the batches and at the end: resident memory, threads, open files, and the
living objects of the pipeline (batches on their way, claims on slots, events, staged buffers). Every lane that a CPU
has is run: the host's thread, and staging through buffers as for a device. Each run goes over the batches in epochs of
500, leaves a loop early now and then, and evaluates in between. Expected: no growth, but for a few MB of memory that
allocators keep. Exits with 1 where something grew.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_report
from rich.console import Console
from rich.table import Table
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings

ROWS, BATCH_SIZE, EPOCH = 4000, 4, 500
LANES = {
    "host lane": CacheSettings(size="5%"),
    "staging": CacheSettings(size="5%", kernels="torch", transfer="staging"),
}
OURS = "recsys_offload.embedding."
ALLOWED_MEGABYTES = 16


def make_batch(random: np.random.Generator) -> KeyedJaggedTensor:
    """Two features with bags of 0 to 3 ids, most of them small ones."""
    lengths = torch.from_numpy(random.integers(0, 4, 2 * BATCH_SIZE))
    ids = (ROWS * random.random(int(lengths.sum())) ** 4).astype(np.int64)
    return KeyedJaggedTensor(["user", "item"], torch.from_numpy(ids), lengths=lengths)


def endless(seed: int) -> Iterator[KeyedJaggedTensor]:
    random = np.random.default_rng(seed)
    while True:
        yield make_batch(random)


class Epoch:
    """So many batches of an endless stream, anew for every loop."""

    def __init__(self, stream: Iterator[KeyedJaggedTensor]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        for _ in range(EPOCH):
            yield next(self._stream)


def footprint() -> dict[str, Any]:
    """What the process holds now."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    objects = Counter(f"{kind.__module__}.{kind.__name__}" for kind in kinds if str(kind.__module__).startswith(OURS))
    status = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    return {
        "resident_megabytes": kilobytes / 1024,
        "threads": threading.active_count(),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "objects": dict(objects),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    }


def footprint_at_rest(collection: HostEmbeddingBagCollection) -> dict[str, Any]:
    """What the process holds when the lanes have done all they were given: how far they are is chance otherwise."""
    collection.flush()
    collection.statistics.counts()
    return footprint()


def growth(early: dict[str, Any], late: dict[str, Any]) -> list[str]:
    """What there is more of at the end, in words; empty where all is well."""
    more = []
    megabytes = late["resident_megabytes"] - early["resident_megabytes"]
    if megabytes > ALLOWED_MEGABYTES:
        more.append(f"{megabytes:.0f} MB of resident memory")
    for name in ("threads", "open_files", "tensors"):
        if late[name] > early[name]:
            more.append(f"{late[name] - early[name]} {name}")
    for kind, count in late["objects"].items():
        if count > early["objects"].get(kind, 0):
            more.append(f"{count - early['objects'].get(kind, 0)} {kind}")
    return more


def soak(cache: CacheSettings, batches: int) -> dict[str, Any]:
    """Trains on so many batches; the footprint is taken between two loops, when nothing is on its way."""
    collection = HostEmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, 8, name, feature_names=[name]) for name in ("user", "item")],
        optimizer=SparseOptimizerSettings(name="adagrad", learning_rate=0.1),
        placements={"user": "cached", "item": "cached"},
        cache=cache,
    )
    loop = prefetch(Epoch(endless(0)), collection, 4)
    evaluation = make_batch(np.random.default_rng(1))
    start, done, epochs, early = time.perf_counter(), 0, 0, None
    while done < batches:
        collection.train()
        for step, batch in enumerate(loop):
            if epochs % 5 == 4 and step == EPOCH // 2:
                break
            collection(batch).values().sum().backward()
            done += 1
        del batch
        epochs += 1
        collection.eval()
        with torch.no_grad():
            collection(evaluation)
        if early is None and done >= batches // 4:
            early = footprint_at_rest(collection)
    assert early is not None
    seconds = time.perf_counter() - start
    late = footprint_at_rest(collection)
    counts = collection.statistics.counts()
    return {
        "batches": done,
        "loops": epochs,
        "seconds": seconds,
        "hit_rate": counts.hit_rate,
        "rows_fetched": counts.fetched,
        "after_a_quarter": early,
        "at_the_end": late,
        "grew": growth(early, late),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, help="to train on, in each lane (20000; 2000 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer batches, to see that it works; nothing is written")
    options = parser.parse_args()
    if options.batches is None:
        options.batches = 2000 if options.quick else 20_000
    table = Table("lane", "batches", "hits", "memory, MB", "threads", "files", "objects", "tensors", "grew")
    results = {}
    for name, cache in LANES.items():
        results[name] = result = soak(cache, options.batches)
        early, late = result["after_a_quarter"], result["at_the_end"]
        table.add_row(
            name,
            f"{result['batches']:,}",
            f"{result['hit_rate']:.1%}",
            f"{early['resident_megabytes']:.0f}, {late['resident_megabytes']:.0f}",
            f"{early['threads']}, {late['threads']}",
            f"{early['open_files']}, {late['open_files']}",
            f"{sum(early['objects'].values())}, {sum(late['objects'].values())}",
            f"{early['tensors']}, {late['tensors']}",
            ", ".join(result["grew"]) or "nothing",
        )
    Console(width=130).print(table)
    if not options.quick:
        print(f"Wrote {write_report('soak', {'settings': vars(options), 'lanes': results})}")
    return 1 if any(result["grew"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
