"""Where tables are placed: as stated, or by their sizes, the device's memory and how skewed the ids are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_offload.embedding.config import CacheSettings, EmbeddingSettings, Placement, SparseOptimizerSettings
from recsys_offload.embedding.placement import check_placements, choose_placements, fit_cache

CPU = torch.device("cpu")
FLOAT_BYTES = 4
# Floats per row of 8 weights.
WIDTHS = {"sgd": 8, "rowwise_adagrad": 9, "adagrad": 16, "adam": 24}


def tables(**rows: int) -> list[EmbeddingBagConfig]:
    """Tables of 8 columns."""
    return [EmbeddingBagConfig(count, 8, name, feature_names=[name]) for name, count in rows.items()]


def automatic(optimizer: str = "sgd", **given: Any) -> EmbeddingSettings:
    return EmbeddingSettings(placement="auto", optimizer=SparseOptimizerSettings(name=optimizer), **given)


def row_bytes(optimizer: str = "sgd") -> int:
    return WIDTHS[optimizer] * FLOAT_BYTES


@pytest.mark.parametrize("placement", ["device", "cached", "host"])
def test_tables_are_placed_as_stated_each_its_own_way_where_named(placement: Placement) -> None:
    settings = EmbeddingSettings(placement=placement, placements={"b": "host", "c": "device"}, device_memory=1)
    chosen = choose_placements(tables(a=5, b=5, c=500), settings, CPU)
    assert chosen == {"a": placement, "b": "host", "c": "device"}


def test_a_table_that_does_not_exist_is_refused() -> None:
    settings = EmbeddingSettings(placements={"b": "host", "d": "host"})
    with pytest.raises(ValueError, match=r"embedding.placements names a table 'd' that does not exist; .*'a', 'b'"):
        choose_placements(tables(a=5, b=5), settings, CPU)


@pytest.mark.parametrize("memory", [None, 0])
def test_without_device_memory_to_fill_tables_stay_on_the_host(memory: int | None) -> None:
    settings = automatic(device_memory=memory, placements={"b": "cached"})
    assert choose_placements(tables(a=5, b=5), settings, CPU) == {"a": "host", "b": "cached"}


@pytest.mark.parametrize("optimizer", WIDTHS)
def test_all_tables_are_resident_where_they_fit_with_their_state(optimizer: str) -> None:
    configs = tables(a=50, b=30)
    needed = 80 * row_bytes(optimizer)
    assert choose_placements(configs, automatic(optimizer, device_memory=needed), CPU) == {"a": "device", "b": "device"}
    assert "cached" in choose_placements(configs, automatic(optimizer, device_memory=needed - 1), CPU).values()


def test_the_smallest_tables_are_resident_up_to_half_of_the_memory_and_the_others_cached() -> None:
    configs = tables(large=1000, c=30, a=10, b=20)
    for budget, resident in [(120, "abc"), (119, "ab"), (60, "ab"), (59, "a"), (20, "a"), (19, "")]:
        chosen = choose_placements(configs, automatic(device_memory=budget * row_bytes()), CPU)
        assert list(chosen) == ["large", "c", "a", "b"]
        assert {name for name, placement in chosen.items() if placement == "device"} == set(resident)
        assert set(chosen.values()) <= {"device", "cached"}


def test_only_tables_left_to_us_share_the_memory() -> None:
    settings = automatic(placements={"large": "device", "cached": "cached"}, device_memory=30 * row_bytes())
    chosen = choose_placements(tables(large=10_000, cached=10_000, a=10, b=20), settings, CPU)
    assert chosen == {"large": "device", "cached": "cached", "a": "device", "b": "device"}


def test_a_table_is_cached_where_its_ids_are_skewed_or_unknown_and_stays_on_the_host_where_they_are_not() -> None:
    skewed, even = np.full(1000, 1e-5, np.float32), np.full(1000, 0.1, np.float32)
    skewed[::100] = 1.0
    configs, settings = tables(skewed=1000, even=1000, unknown=1000), automatic("adam", device_memory=150 * 24 * 4)
    chosen = choose_placements(configs, settings, CPU, {"skewed": skewed, "even": even})
    assert chosen == {"skewed": "cached", "even": "host", "unknown": "cached"}
    # Without state a row is no larger than the vector that a lookup on the host sends.
    without_state = choose_placements(configs, automatic(device_memory=150 * 24 * 4), CPU, {"even": even})
    assert without_state["even"] == "cached"


def test_even_ids_are_cached_from_the_share_on_at_which_fewer_bytes_move() -> None:
    """With one state value per weight a row is twice its vector: half of the rows have to be in the cache."""
    uses = {"a": np.full(100, 0.25, np.float32)}
    for slots, placement in [(49, "host"), (50, "cached")]:
        settings = automatic("adagrad", device_memory=slots * row_bytes("adagrad"))
        assert choose_placements(tables(a=100), settings, CPU, uses) == {"a": placement}


def test_what_resident_tables_take_is_no_part_of_the_cache() -> None:
    """As above, half of the large table's rows have to be in what is left."""
    uses = {"large": np.full(100, 0.25, np.float32)}
    for rows, placement in [(69, "host"), (70, "cached")]:
        settings = automatic("adagrad", device_memory=rows * row_bytes("adagrad"))
        chosen = choose_placements(tables(small=20, large=100), settings, CPU, uses)
        assert chosen == {"small": "device", "large": placement}


@pytest.mark.parametrize("memory", [1, row_bytes("adam") - 1])
def test_memory_for_less_than_a_row_of_a_table(memory: int) -> None:
    uses = {"a": np.array([1.0, 0.5, 0.0], np.float32)}
    chosen = choose_placements(tables(a=3), automatic("adam", device_memory=memory), CPU, uses)
    assert chosen == {"a": "host"}  # nothing of it would be in the cache


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=30),
    st.sampled_from(list(WIDTHS)),
    st.floats(0.2, 0.95),
)
def test_a_cache_of_the_rows_used_most_has_to_move_fewer_bytes(
    eighths: list[int], optimizer: str, share: float
) -> None:
    rows, of_row = len(eighths), row_bytes(optimizer)
    memory = of_row * max(1, int(share * rows))
    slots = memory // of_row
    uses = sorted((eighth / 8 for eighth in eighths), reverse=True)
    moved_by_cache = sum(uses[slots:]) * of_row
    moved_by_host = sum(uses) * 8 * FLOAT_BYTES
    chosen = choose_placements(
        tables(a=rows), automatic(optimizer, device_memory=memory), CPU, {"a": np.array(eighths, np.float32) / 8}
    )
    assert slots < rows
    assert chosen == {"a": "cached" if moved_by_cache <= moved_by_host else "host"}


def test_half_of_the_memory_that_is_free_is_taken_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def memory(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 2 * 30 * row_bytes(), 10**9

    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    device = torch.device("cuda", 1)
    assert choose_placements(tables(a=10, b=20), automatic(), device) == {"a": "device", "b": "device"}
    assert choose_placements(tables(a=10, b=21), automatic(), device) == {"a": "device", "b": "cached"}
    assert choose_placements(tables(a=10, b=21), automatic(device_memory=31 * row_bytes()), device)["b"] == "device"
    assert asked == [device, device]


def test_what_is_said_about_tables_may_leave_some_out() -> None:
    check_placements(["a", "b", "c"], {}, CacheSettings())
    placements: dict[str, Placement] = {"a": "cached", "b": "device"}
    check_placements(["a", "b", "c"], placements, CacheSettings(sizes={"a": 5}))


def test_placements_that_cannot_be_are_refused() -> None:
    names, own = ["a", "b"], CacheSettings(sizes={"a": 5})
    with pytest.raises(ValueError, match=r"placements names a table 'c' that does not exist; there are \['a', 'b'\]"):
        check_placements(names, {"c": "host"}, CacheSettings())
    with pytest.raises(ValueError, match=r"cache.sizes names a table 'c' that does not exist; there are \['a', 'b'\]"):
        check_placements(names, {"a": "cached"}, CacheSettings(sizes={"c": 5}))
    for placements in ({}, {"b": "cached"}, {"a": "host"}, {"a": "device"}):
        with pytest.raises(ValueError, match=r"cache.sizes gives table 'a' a cache, but its placement is not cached"):
            check_placements(names, placements, own)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table 'b': placement must be device, cached or host, not 'auto'"):
        check_placements(names, {"a": "host", "b": "auto"}, CacheSettings())
    with pytest.raises(ValueError, match="table 'b': placement must be device, cached or host, not 'disk'"):
        check_placements(names, {"b": "disk"}, CacheSettings())  # type: ignore[dict-item]


def test_a_table_with_a_cache_size_of_its_own_is_cached() -> None:
    settings = automatic(device_memory=10**6, cache=CacheSettings(sizes={"a": "20%"}))
    assert choose_placements(tables(a=10, b=10), settings, CPU) == {"a": "cached", "b": "device"}
    on_cpu = automatic(cache=CacheSettings(sizes={"a": "20%"}))
    assert choose_placements(tables(a=10, b=10), on_cpu, CPU) == {"a": "cached", "b": "host"}


@pytest.mark.parametrize(("size", "slots"), [("10%", "10%"), ("50%", "50%"), ("51%", 50), (49, 49), (99, 50)])
def test_the_cache_of_tables_placed_by_auto_is_what_is_left_of_the_memory_at_most(
    size: int | str, slots: int | str
) -> None:
    settings = automatic(device_memory=70 * row_bytes(), cache=CacheSettings(size=size))
    placements = choose_placements(tables(small=20, large=100), settings, CPU)
    assert placements == {"small": "device", "large": "cached"}
    assert fit_cache(tables(small=20, large=100), settings, placements, CPU).size == slots


def test_a_cache_that_the_user_asks_for_is_as_large_as_asked() -> None:
    settings = EmbeddingSettings(placement="cached", device_memory=1, cache=CacheSettings(size="90%"))
    placements = choose_placements(tables(a=10), settings, CPU)
    assert fit_cache(tables(a=10), settings, placements, CPU) == settings.cache
