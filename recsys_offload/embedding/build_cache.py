"""Puts together the cache that the settings describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from recsys_offload.embedding.cache import DeviceCache, GroupCache
from recsys_offload.embedding.config import CacheSettings, SparseOptimizerSettings, slots_for
from recsys_offload.embedding.directory import Directory
from recsys_offload.embedding.host_memory import is_registered
from recsys_offload.embedding.kernels import device_torch
from recsys_offload.embedding.resident import ResidentDirectory
from recsys_offload.embedding.runtime import Runtime, runtime_for
from recsys_offload.embedding.slots import HostSlots, Slots
from recsys_offload.embedding.slots_device import DeviceSlots
from recsys_offload.embedding.slots_fbgemm import FbgemmSlots
from recsys_offload.embedding.statistics import CacheStatistics
from recsys_offload.embedding.store import TableGroup
from recsys_offload.embedding.threads import KernelThreads
from recsys_offload.embedding.transfer import HostTransfer, Transfer
from recsys_offload.embedding.transfer_device import StagedTransfer, ZeroCopyTransfer


@dataclass(frozen=True)
class LookupSettings:
    """What is computed over the slots, and where.

    Attributes:
        device: of the slots.
        optimizer: of the tables.
        pooled: whether bags are pooled, or every id's row is wanted.
    """

    device: torch.device
    optimizer: SparseOptimizerSettings
    pooled: bool


def slot_counts(groups: Sequence[TableGroup], size: int | str) -> list[int]:
    """How many slots each group gets of a cache of ``size`` that they share: of rows by rows, of bytes by bytes."""
    rows = [group.row_count for group in groups]
    if isinstance(size, int):
        return [slots_for(max(1, size * count // sum(rows)), count, 1) for count in rows]
    if size.strip().endswith("%"):
        return [slots_for(size, count, 1) for count in rows]
    all_bytes = sum(count * group.row_bytes for group, count in zip(groups, rows, strict=True))
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
            counts.append(slots_for(own_size, group.row_count, group.row_bytes))
        else:
            counts.append(next(shares))
    return counts


def _limits(groups: Sequence[TableGroup], settings: CacheSettings, counts: Sequence[int]) -> list[int]:
    """The most slots that each group may grow to; of a table with a cache of its own, the limit is its own, too.

    Raises:
        ValueError: the limit of the common cache is less than its size.
    """
    if settings.limit is None:
        return [group.row_count for group in groups]
    limits = _counts(groups, settings, settings.limit)
    for index, (group, count) in enumerate(zip(groups, counts, strict=True)):
        if next(iter(group.tables)) in settings.sizes:
            limits[index] = max(count, slots_for(settings.limit, group.row_count, group.row_bytes))
        elif limits[index] < count:
            raise ValueError(f"cache.limit {settings.limit} is less than the cache's size {settings.size}")
    return limits


def _kernels_name(settings: CacheSettings, device: torch.device) -> str:
    """What computes over the slots, with ``auto`` decided: ``host`` on a CPU."""
    if settings.kernels != "auto":
        return settings.kernels
    if device.type == "cpu":
        return "host"
    return "torch" if find_spec("triton") is None else "triton"


def _device_kernels(name: str, device: torch.device) -> ModuleType:
    """The kernels ``triton`` or ``torch``.

    Raises:
        ValueError: this machine cannot run them.
    """
    if name == "torch":
        return device_torch
    if find_spec("triton") is None:
        raise ValueError("cache.kernels: triton is not installed; take torch or auto")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "cache.kernels: triton needs a GPU; take auto, or set TRITON_INTERPRET=1 to try it on a CPU, very slowly"
        )
    return import_module("recsys_offload.embedding.kernels.device")


def _make_slots(
    group: TableGroup, count: int, kernels: str, features: int, lookup: LookupSettings, threads: KernelThreads
) -> Slots:
    device = lookup.device
    if kernels == "host":
        return HostSlots(group.dim, group.width, count, threads)
    if kernels == "fbgemm":
        return FbgemmSlots(group.dim, group.width, count, features, lookup.optimizer, lookup.pooled, device)
    rows = torch.zeros(count, group.width, device=device)
    return DeviceSlots(rows, group.dim, _device_kernels(kernels, device))


def _make_transfer(
    settings: CacheSettings,
    kernels: str,
    groups: Sequence[TableGroup],
    runtime: Runtime,
    statistics: CacheStatistics,
) -> Transfer:
    """The lane that rows move in.

    Raises:
        ValueError: the settings ask for one that is not possible here.
    """
    on_host = runtime.device.type == "cpu"
    reachable = on_host or all(is_registered(group.rows) for group in groups)
    if settings.transfer == "zero_copy" or (settings.transfer == "auto" and not on_host and kernels == "triton"):
        if kernels != "triton":
            raise ValueError("cache.transfer: zero_copy is done by Triton kernels; set cache.kernels to triton as well")
        if reachable:
            return ZeroCopyTransfer(runtime, _device_kernels(kernels, runtime.device), statistics)
        if settings.transfer == "zero_copy":
            raise ValueError(
                "cache.transfer: zero_copy needs host memory that is pinned, and it could not be (see the warning); "
                "take staging"
            )
    if settings.transfer == "auto" and on_host:
        return HostTransfer(runtime, statistics)
    if kernels == "host":
        raise ValueError(
            "cache.transfer: staging goes to slots in device memory; take auto, or set cache.kernels to torch"
        )
    return StagedTransfer(runtime, statistics)


def build_cache(
    groups: Sequence[TableGroup],
    features: Sequence[int],
    settings: CacheSettings,
    lookup: LookupSettings,
    threads: KernelThreads,
    statistics: CacheStatistics,
) -> DeviceCache:
    """The cache for ``groups``, each placed ``device`` or ``cached``.

    Args:
        groups: of tables.
        features: for each group, how many features read it.
        settings: of the cache.
        lookup: what is computed over the slots, and where.
        threads: of the host's kernels.
        statistics: where it is noted what the cache does.

    Raises:
        MemoryError: there is not enough memory for the slots.
        ValueError: the settings ask for something that this machine has not.
    """
    runtime = runtime_for(lookup.device)
    kernels = _kernels_name(settings, lookup.device)
    counts = _counts(groups, settings, settings.size)
    limits = _limits(groups, settings, counts)
    caches = [
        GroupCache(
            group,
            _make_slots(group, count, kernels, group_features, lookup, threads),
            ResidentDirectory(count) if group.placement == "device" else Directory(group.row_count, count, threads),
            limit,
        )
        for group, count, limit, group_features in zip(groups, counts, limits, features, strict=True)
    ]
    transfer = _make_transfer(settings, kernels, groups, runtime, statistics)
    cache = DeviceCache(caches, runtime, transfer, statistics)
    cache.reload()
    return cache
