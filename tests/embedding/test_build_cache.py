"""The cache that the settings describe: the slots of every group, and what computes over and moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.embedding import build_cache as build_cache_module
from recsys_offload.embedding.build_cache import LookupSettings, build_cache, slot_counts
from recsys_offload.embedding.cache import DeviceCache
from recsys_offload.embedding.config import CacheSettings, Placement, SparseOptimizerSettings
from recsys_offload.embedding.directory import Directory
from recsys_offload.embedding.resident import ResidentDirectory
from recsys_offload.embedding.runtime import HostRuntime
from recsys_offload.embedding.slots import HostSlots, Slots
from recsys_offload.embedding.slots_device import DeviceSlots
from recsys_offload.embedding.slots_fbgemm import FbgemmSlots
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.store import HostTables, TableGroup
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.transfer import HostTransfer, Transfer
from recsys_offload.embedding.transfer_device import StagedTransfer

THREADS = KernelThreads(1)
CPU = torch.device("cpu")


@dataclass
class Table:
    name: str
    rows: int
    dim: int = 4
    placement: Placement = "cached"


def groups_of(tables: Sequence[Table], settings: CacheSettings, optimizer: SparseOptimizerSettings) -> list[TableGroup]:
    """The groups that have slots, as a collection makes them: a table with a cache of its own is one for itself."""
    return HostTables(
        [EmbeddingBagConfig(table.rows, table.dim, table.name, feature_names=[table.name]) for table in tables],
        optimizer,
        0,
        THREADS,
        pin=False,
        placements={table.name: table.placement for table in tables},
        own_caches=settings.sizes,
    ).groups


@contextmanager
def built(
    tables: Sequence[Table], settings: CacheSettings, optimizer: str = "sgd", device: torch.device = CPU, **options: Any
) -> Iterator[DeviceCache]:
    chosen = SparseOptimizerSettings(name=optimizer, **options)
    groups = groups_of(tables, settings, chosen)
    lookup = LookupSettings(device, chosen, pooled=True)
    cache = build_cache(groups, [len(one.tables) for one in groups], settings, lookup, THREADS, CacheStatistics())
    try:
        yield cache
    finally:
        cache.close()


def sized_groups(*rows_and_dims: tuple[int, int]) -> list[TableGroup]:
    """Groups without memory, of one table each and no state."""
    groups = []
    for place, (rows, dim) in enumerate(rows_and_dims):
        group = TableGroup(dim, "cached", {})
        group.add(f"table {place}", rows)
        groups.append(group)
    return groups


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (40, [10, 30]),
        (41, [10, 30]),
        (44, [11, 33]),
        (1, [1, 1]),
        (10**9, [100, 300]),
        ("10%", [10, 30]),
        (" 10.1% ", [11, 31]),
        ("100%", [100, 300]),
        ("0.001%", [1, 1]),
    ],
)
def test_rows_are_shared_by_rows_and_shares_are_of_each_group(size: int | str, counts: list[int]) -> None:
    assert slot_counts(sized_groups((100, 4), (300, 32)), size) == counts


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        ("8000B", [100, 50]),
        ("4000B", [50, 25]),
        ("4079B", [50, 25]),
        ("4080", [51, 25]),
        ("1B", [1, 1]),
        ("1GiB", [100, 50]),
        ("2kB", [25, 12]),
    ],
)
def test_bytes_are_shared_by_bytes(size: str, counts: list[int]) -> None:
    assert slot_counts(sized_groups((100, 4), (50, 32)), size) == counts  # 1600 and 6400 bytes


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 200)), min_size=1, max_size=5),
    st.integers(1, 10**12),
    st.booleans(),
)
def test_groups_together_get_no_more_than_is_shared(
    rows_and_dims: list[tuple[int, int]], size: int, of_bytes: bool
) -> None:
    groups = sized_groups(*rows_and_dims)
    counts = slot_counts(groups, f"{size}B" if of_bytes else size)
    costs = [group.row_bytes if of_bytes else 1 for group in groups]
    assert all(1 <= count <= group.row_count for count, group in zip(counts, groups, strict=True))
    # Those that were given their only slot may have been given it on top.
    assert sum(count * cost for count, cost in zip(counts, costs, strict=True) if count > 1) <= size
    total = sum(group.row_count * cost for group, cost in zip(groups, costs, strict=True))
    for group, count in zip(groups, counts, strict=True):
        assert count >= min(group.row_count, int(group.row_count * size / total * (1 - 1e-9)))


TABLES = [
    Table("shared", 100),
    Table("wide", 300, dim=8),
    Table("own", 50),
    Table("resident", 70, placement="device"),
]


def counts_of(cache: DeviceCache) -> dict[str, tuple[int, int]]:
    """For each table, slots and the limit of its group."""
    for group in cache.groups:
        assert group.slots.count == group.directory.slots
    return {name: (group.slots.count, group.limit) for group in cache.groups for name in group.group.tables}


@pytest.mark.parametrize(
    ("size", "own", "counts"),
    [
        (40, 7, (10, 30, 7)),
        ("20%", "10%", (20, 60, 5)),
        ("20%", 10**6, (20, 60, 50)),
        (80, "160B", (20, 60, 8)),  # rows of 4 weights and 1 of state
        ("1280B", "39B", (10, 30, 1)),  # of 2,000 and 10,800 bytes
    ],
)
def test_groups_share_a_size_but_for_tables_with_one_of_their_own_and_resident_ones(
    size: int | str, own: int | str, counts: tuple[int, int, int]
) -> None:
    settings = CacheSettings(size=size, sizes={"own": own})
    with built(TABLES, settings, "rowwise_adagrad") as cache:
        shared, wide, alone = counts
        assert counts_of(cache) == {
            "shared": (shared, 100),
            "wide": (wide, 300),
            "own": (alone, 50),
            "resident": (70, 70),
        }
        assert cache.slot_count == sum(counts) + 70
        kinds = {name: type(group.directory) for group in cache.groups for name in group.group.tables}
        assert kinds == {"shared": Directory, "wide": Directory, "own": Directory, "resident": ResidentDirectory}


def test_tables_of_one_width_share_slots() -> None:
    with built([Table("a", 100), Table("b", 60), Table("c", 40, dim=8)], CacheSettings(size=50)) as cache:
        assert [list(group.group.tables) for group in cache.groups] == [["a", "b"], ["c"]]
        assert [group.slots.count for group in cache.groups] == [40, 10]


def test_resident_tables_are_in_their_slots_from_the_start_and_the_cache_is_empty() -> None:
    with built(TABLES, CacheSettings(kernels="torch"), "adagrad") as cache:
        cache.flush()  # waits for the rows
        for group in cache.groups:
            if group.group.placement == "device":
                assert isinstance(group.slots, DeviceSlots)
                assert np.array_equal(group.slots.rows.numpy(), group.group.rows)
                assert group.group.rows.any()
            else:
                assert group.directory.residents == 0


@pytest.mark.parametrize(
    ("limit", "limits"), [(40, (10, 30)), (80, (20, 60)), ("50%", (50, 150)), ("4kB", (35, 107)), (10**9, (100, 300))]
)
def test_groups_share_a_limit_as_they_share_the_size(limit: int | str, limits: tuple[int, int]) -> None:
    tables = [Table("shared", 100), Table("wide", 300, dim=8), Table("resident", 70, placement="device")]
    with built(tables, CacheSettings(size=40, limit=limit)) as cache:
        assert counts_of(cache) == {"shared": (10, limits[0]), "wide": (30, limits[1]), "resident": (70, 70)}


@pytest.mark.parametrize(("size", "limit"), [(40, 39), ("20%", "10%"), ("50%", 10), (200, "1kB")])
def test_a_limit_below_the_size_is_refused(size: int | str, limit: int | str) -> None:
    message = f"cache.limit {limit} is less than the cache's size {size}"
    with pytest.raises(ValueError, match=message), built(TABLES[:2], CacheSettings(size=size, limit=limit)):
        pass


def test_a_table_with_a_cache_of_its_own_has_a_limit_of_its_own() -> None:
    tables = [Table("a", 100), Table("b", 200)]
    for limit, most in [(30, 30), ("25%", 50), (5, 20)]:  # at least its size
        with built(tables, CacheSettings(size=5, sizes={"b": 20}, limit=limit)) as cache:
            assert counts_of(cache)["b"] == (20, most)


def test_slots_that_do_not_fit_in_memory_are_refused() -> None:
    group = TableGroup(4, "cached", {})
    group.add("huge", 2**45)
    lookup = LookupSettings(CPU, SparseOptimizerSettings(name="sgd"), pooled=True)
    with pytest.raises(MemoryError, match=r"a cache of 35,184,372,088,832 rows of 4 weights"):
        build_cache([group], [1], CacheSettings(size="100%"), lookup, THREADS, CacheStatistics())


@pytest.mark.parametrize(
    ("kernels", "transfer", "slots", "lane"),
    [
        ("auto", "auto", HostSlots, HostTransfer),
        ("torch", "auto", DeviceSlots, HostTransfer),
        ("torch", "staging", DeviceSlots, StagedTransfer),
        ("fbgemm", "auto", FbgemmSlots, HostTransfer),
        ("fbgemm", "staging", FbgemmSlots, StagedTransfer),
    ],
)
def test_what_computes_over_slots_and_moves_rows(
    kernels: Any, transfer: Any, slots: type[Slots], lane: type[Transfer]
) -> None:
    with built(TABLES, CacheSettings(kernels=kernels, transfer=transfer), "rowwise_adagrad") as cache:
        assert {type(group.slots) for group in cache.groups} == {slots}
        assert type(cache._transfer) is lane
        for group in cache.groups:
            assert (group.slots.dim, group.slots.width) == (group.group.dim, group.group.dim + 1)


def refused(message: str, optimizer: str = "sgd", tables: Sequence[Table] = TABLES[:2], **given_settings: Any) -> None:
    cache = {name: given_settings.pop(name) for name in ("kernels", "transfer") if name in given_settings}
    with pytest.raises(ValueError, match=message), built(tables, CacheSettings(**cache), optimizer, **given_settings):
        pass


@pytest.mark.parametrize("transfer", ["auto", "staging", "zero_copy"])
def test_triton_is_refused_without_a_gpu(transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(
        "cache.kernels: triton needs a GPU; take auto, or set TRITON_INTERPRET=1", kernels="triton", transfer=transfer
    )


def test_triton_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cache_module, "find_spec", lambda name: None)
    refused("cache.kernels: triton is not installed; take torch or auto", kernels="triton")


@pytest.mark.parametrize("kernels", ["auto", "torch", "fbgemm"])
def test_zero_copy_is_refused_without_triton_kernels(kernels: str) -> None:
    message = "cache.transfer: zero_copy is done by Triton kernels; set cache.kernels to triton as well"
    refused(message, kernels=kernels, transfer="zero_copy")


def test_staging_is_refused_for_slots_that_the_host_computes_over() -> None:
    message = "cache.transfer: staging goes to slots in device memory; take auto, or set cache.kernels to torch"
    refused(message, transfer="staging")


def test_fbgemm_is_refused_what_it_computes_otherwise() -> None:
    refused("cache.kernels: fbgemm has no adam like ours", kernels="fbgemm", optimizer="adam")
    refused("cache.kernels: fbgemm ignores weight_decay", kernels="fbgemm", weight_decay=0.1)
    message = "cache.kernels: fbgemm needs an embedding_dim that is a multiple of 4, not 6"
    refused(message, kernels="fbgemm", tables=[Table("a", 10), Table("b", 10, dim=6)])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there_is_refused_by_its_name() -> None:
    refused("cuda", device=torch.device("cuda"))


class Elsewhere(HostRuntime):
    """A runtime of a device that cannot be here."""

    device = torch.device("cuda")


def test_memory_that_is_not_pinned_is_staged_and_no_zero_copy() -> None:
    settings = CacheSettings(kernels="triton", transfer="zero_copy")
    groups = groups_of(TABLES[:1], settings, SparseOptimizerSettings(name="sgd"))
    rest = ("triton", groups, Elsewhere(), CacheStatistics())
    with pytest.raises(ValueError, match=r"cache.transfer: zero_copy needs host memory that is pinned.* take staging"):
        build_cache_module._make_transfer(settings, *rest)
    transfer = build_cache_module._make_transfer(CacheSettings(), *rest)
    assert type(transfer) is StagedTransfer
    transfer.close()


def test_what_computes_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, settings = torch.device("cuda"), CacheSettings()
    assert build_cache_module._kernels_name(settings, CPU) == "host"
    monkeypatch.setattr(build_cache_module, "find_spec", lambda name: name)
    assert build_cache_module._kernels_name(settings, cuda) == "triton"
    monkeypatch.setattr(build_cache_module, "find_spec", lambda name: None)
    assert build_cache_module._kernels_name(settings, cuda) == "torch"
    assert build_cache_module._kernels_name(CacheSettings(kernels="fbgemm"), cuda) == "fbgemm"
