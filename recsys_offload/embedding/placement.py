"""Where each table is looked up and updated, where the user leaves that to us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from recsys_offload.embedding.config import CacheSettings, EmbeddingSettings, Placement, slots_for
from recsys_offload.embedding.optimizers import state_columns
from recsys_offload.embedding.store import FLOAT_BYTES

# The part of a budget that whole tables may take before there is a cache for the others.
RESIDENT_SHARE = 1 / 2
# The part of the device's free memory that is taken where no budget is given: the dense part needs some, too.
FREE_MEMORY_SHARE = 1 / 2


def choose_placements(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    settings: EmbeddingSettings,
    device: torch.device,
    uses: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Placement]:
    """The placement of every table: what the settings say, with ``auto`` decided.

    With ``auto``, a table with a cache size of its own is cached. Of the others, small tables are resident, because
    nearly all of their rows are in every batch; the rest shares what is left as a cache, but for those tables where
    that would move more bytes than looking up on the host. Where there
    is no device memory to fill (a CPU, and no ``device_memory``), tables stay on the host.

    Args:
        configs: of all tables.
        settings: ``placement``, ``placements`` and ``device_memory``.
        device: that has the cache.
        uses: table -> float32 ``[rows]``: how many batches in one use each row (``uses.count_uses``), if known.

    Returns:
        Table -> ``device``, ``cached`` or ``host``.

    Raises:
        ValueError: a table is named that does not exist.
    """
    names = [config.name for config in configs]
    for name in settings.placements:
        if name not in names:
            raise ValueError(f"embedding.placements names a table {name!r} that does not exist; there are {names}")
    placements = {name: settings.placements.get(name, settings.placement) for name in names}
    for name in settings.cache.sizes:  # who gives it a cache wants it cached
        if placements.get(name) == "auto":
            placements[name] = "cached"
    automatic = [config for config in configs if placements[config.name] == "auto"]
    if automatic:
        budget = _budget(settings, device)
        placements.update(_place(automatic, settings, budget, uses or {}))
    return placements


def fit_cache(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    settings: EmbeddingSettings,
    placements: Mapping[str, Placement],
    device: torch.device,
) -> CacheSettings:
    """The settings of the cache, its size cut where tables placed by ``auto`` would exceed ``device_memory`` with it.

    Args:
        configs: of all tables.
        settings: that the placements have been chosen by.
        placements: table -> placement, as ``choose_placements`` says.
        device: that has the cache.
    """
    automatic = [config for config in configs if settings.placements.get(config.name, settings.placement) == "auto"]
    cached = [config for config in automatic if placements[config.name] == "cached"]
    if not cached:
        return settings.cache
    resident = [config for config in automatic if placements[config.name] == "device"]
    left = _budget(settings, device) - sum(_table_bytes(config, settings) for config in resident)
    sharing = [
        config for config in configs if placements[config.name] == "cached" and config.name not in settings.cache.sizes
    ]
    rows = sum(config.num_embeddings for config in sharing)
    asked = slots_for(settings.cache.size, rows, sum(_table_bytes(config, settings) for config in sharing) // rows)
    room = int(rows * left / sum(_table_bytes(config, settings) for config in cached))
    return settings.cache if asked <= room else settings.cache.model_copy(update={"size": max(1, room)})


def check_placements(names: Sequence[str], placements: Mapping[str, Placement], cache: CacheSettings) -> None:
    """Checks what is said about tables against what tables there are.

    Args:
        names: of all tables.
        placements: table -> placement, decided.
        cache: whose ``sizes`` name tables, too.

    Raises:
        ValueError: a table does not exist, has no such placement, or has a cache of its own without being cached.
    """
    for what, given in {"placements": placements, "cache.sizes": cache.sizes}.items():
        for name in given:
            if name not in names:
                raise ValueError(f"{what} names a table {name!r} that does not exist; there are {list(names)}")
    for name in cache.sizes:
        if placements.get(name, "host") != "cached":
            raise ValueError(f"cache.sizes gives table {name!r} a cache, but its placement is not cached")
    for name, placement in placements.items():
        if placement not in ("device", "cached", "host"):
            raise ValueError(f"table {name!r}: placement must be device, cached or host, not {placement!r}")


def _budget(settings: EmbeddingSettings, device: torch.device) -> int:
    """Bytes of device memory that tables may take."""
    if settings.device_memory is not None:
        return settings.device_memory
    if device.type == "cpu":
        return 0
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free * FREE_MEMORY_SHARE)


def _table_bytes(config: EmbeddingBagConfig | EmbeddingConfig, settings: EmbeddingSettings) -> int:
    """Of a table and its optimizer state."""
    state = state_columns(settings.optimizer.name, config.embedding_dim)
    return config.num_embeddings * (config.embedding_dim + sum(state.values())) * FLOAT_BYTES


def _place(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    settings: EmbeddingSettings,
    budget: int,
    uses: Mapping[str, np.ndarray],
) -> dict[str, Placement]:
    if budget == 0:
        return {config.name: "host" for config in configs}
    sizes = {config.name: _table_bytes(config, settings) for config in configs}
    placements: dict[str, Placement] = {}
    resident = 0
    limit = budget if sum(sizes.values()) <= budget else budget * RESIDENT_SHARE
    ascending = sorted(configs, key=lambda config: sizes[config.name])
    for config in ascending:
        if resident + sizes[config.name] > limit:
            break
        placements[config.name] = "device"
        resident += sizes[config.name]
    others = [config for config in ascending if config.name not in placements]
    share = (budget - resident) / max(1, sum(sizes[config.name] for config in others))
    for config in others:
        counts = uses.get(config.name)
        cached = counts is None or _cache_moves_less(config, counts, sizes[config.name] / config.num_embeddings, share)
        placements[config.name] = "cached" if cached else "host"
    return placements


def _cache_moves_less(
    config: EmbeddingBagConfig | EmbeddingConfig, uses: np.ndarray, row_bytes: float, share: float
) -> bool:
    """Whether a cache of the most used ``share`` of the rows moves fewer bytes per batch than looking up on the host.

    A row that is not cached goes to the device and back with its state; a looked-up vector goes there, and its
    gradient back. There are at least as many vectors as distinct rows.
    """
    rare = len(uses) - int(share * len(uses))
    missed = float(np.partition(uses, rare - 1)[:rare].sum())
    return missed * row_bytes <= float(uses.sum()) * config.embedding_dim * FLOAT_BYTES
