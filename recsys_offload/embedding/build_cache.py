"""Puts together the cache that the settings describe."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_offload.embedding.cache import DeviceCache, GroupCache
from recsys_offload.embedding.config import CacheSettings, slots_for
from recsys_offload.embedding.directory import Directory
from recsys_offload.embedding.resident import ResidentDirectory
from recsys_offload.embedding.runtime import Runtime, runtime_for
from recsys_offload.embedding.slots import HostSlots, Slots
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.store import TableGroup
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.transfer import HostTransfer, Transfer

FLOAT_BYTES = 4


def slot_counts(groups: Sequence[TableGroup], size: int | str) -> list[int]:
    """How many slots each group gets of a cache of ``size`` that they share: of rows by rows, of bytes by bytes."""
    rows = [group.row_count for group in groups]
    if isinstance(size, int):
        return [slots_for(max(1, size * count // sum(rows)), count, 1) for count in rows]
    if size.strip().endswith("%"):
        return [slots_for(size, count, 1) for count in rows]
    all_bytes = sum(count * group.width * FLOAT_BYTES for group, count in zip(groups, rows, strict=True))
    share = slots_for(size, 2**62, 1) / all_bytes
    return [slots_for(max(1, int(share * count)), count, 1) for count in rows]


def _counts(groups: Sequence[TableGroup], settings: CacheSettings, size: int | str) -> list[int]:
    """The slots of each group: all rows, its share of the common size, or what its only table was given."""
    own = [settings.sizes.get(next(iter(group.tables))) for group in groups]
    sharing = [
        group for group, own_size in zip(groups, own, strict=True) if group.placement == "cached" and own_size is None
    ]
    shares = iter(slot_counts(sharing, size) if sharing else [])
    counts = []
    for group, own_size in zip(groups, own, strict=True):
        if group.placement == "device":
            counts.append(group.row_count)
        elif own_size is not None:
            counts.append(slots_for(own_size, group.row_count, group.width * FLOAT_BYTES))
        else:
            counts.append(next(shares))
    return counts


def _make_slots(
    group: TableGroup, count: int, settings: CacheSettings, device: torch.device, threads: KernelThreads
) -> Slots:
    return HostSlots(group.dim, group.width, count, threads)


def _make_transfer(settings: CacheSettings, runtime: Runtime, statistics: CacheStatistics) -> Transfer:
    return HostTransfer(runtime, statistics)


def build_cache(
    groups: Sequence[TableGroup],
    settings: CacheSettings,
    device: torch.device,
    threads: KernelThreads,
    statistics: CacheStatistics,
) -> DeviceCache:
    """The cache for ``groups``, each placed ``device`` or ``cached``.

    Raises:
        MemoryError: there is not enough memory for the slots.
        ValueError: the settings ask for something that this machine has not.
    """
    runtime = runtime_for(device)
    counts = _counts(groups, settings, settings.size)
    limits = [group.row_count for group in groups]
    if settings.limit is not None:
        limits = _counts(groups, settings, settings.limit)
        if any(limit < count for limit, count in zip(limits, counts, strict=True)):
            raise ValueError(f"cache.limit {settings.limit} is less than the cache's size {settings.size}")
    caches = [
        GroupCache(
            group,
            _make_slots(group, count, settings, device, threads),
            ResidentDirectory(count) if group.placement == "device" else Directory(group.row_count, count, threads),
            limit,
        )
        for group, count, limit in zip(groups, counts, limits, strict=True)
    ]
    cache = DeviceCache(caches, runtime, _make_transfer(settings, runtime, statistics), statistics)
    cache.reload()
    return cache
