"""The settings of the tables and the cache: sizes in rows, shares and bytes, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from recsys_offload.embedding.config import CacheSettings, EmbeddingSettings, SparseOptimizerSettings, slots_for


@pytest.mark.parametrize(
    ("size", "rows", "row_bytes", "slots"),
    [
        (5, 100, 8, 5),
        (100, 100, 8, 100),
        (101, 100, 8, 100),
        (0, 100, 8, 1),
        ("10%", 100, 8, 10),
        ("10%", 101, 8, 11),
        ("0.07%", 10_000, 8, 7),
        ("10%", 9, 8, 1),
        ("0.001%", 9, 8, 1),
        ("12.5%", 16, 8, 2),
        ("12.5%", 17, 8, 3),
        ("100%", 7, 8, 7),
        ("5.%", 100, 8, 5),
        (" 25 % ", 100, 8, 25),
        ("1KiB", 1000, 64, 16),
        ("1KiB", 1000, 100, 10),
        ("1kB", 1000, 100, 10),
        ("1 KiB", 1000, 1024, 1),
        ("1023B", 1000, 1024, 1),
        ("800", 1000, 8, 100),
        ("2GiB", 1000, 8, 1000),
        ("0.5MiB", 10**9, 1024, 512),
        ("20TiB", 2**40, 1, 2**40),
    ],
)
def test_a_size_stands_for_at_least_one_slot_and_at_most_all_rows(
    size: int | str, rows: int, row_bytes: int, slots: int
) -> None:
    assert slots_for(size, rows, row_bytes) == slots


@given(st.integers(1, 100), st.integers(1, 10**12))
def test_a_share_of_whole_percents_is_rounded_up(share: int, rows: int) -> None:
    assert slots_for(f"{share}%", rows, 4) == math.ceil(share * rows / 100)


@given(st.integers(1, 2**40), st.integers(1, 2**20), st.integers(1, 4096))
def test_the_slots_take_no_more_bytes_than_given(size: int, rows: int, row_bytes: int) -> None:
    slots = slots_for(f"{size}B", rows, row_bytes)
    assert slots == rows or slots == 1 or slots * row_bytes <= size < (slots + 1) * row_bytes
    assert slots * row_bytes <= size or slots == 1


WRONG_SIZES = ["", "many", "10 rows", "-5", "-10%", "10 percent", "1e3", "%", "GiB"]
# What begins like a size and does not end like one.
HALF_WRONG_SIZES = [".5%", "10%%", "1.5.3%", "10% of all", "1,000", "2GiB or so", "2GiB,"]


@pytest.mark.parametrize("size", WRONG_SIZES + HALF_WRONG_SIZES)
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError):
        slots_for(size, 1000, 8)
    message = r"size\n.* give rows \(100000\), a share of the rows \(10%\) or bytes \(2GiB\), not "
    with pytest.raises(ValidationError, match=message) as refusal:
        CacheSettings(size=size)
    assert repr(size) in str(refusal.value)


@pytest.mark.parametrize("size", [1, 10**9, "0.1%", "100%", "5 %", "1B", "2GiB", "10 MB"])
def test_sizes_are_kept_as_they_are_given(size: int | str) -> None:
    settings = CacheSettings(size=size, sizes={"users": size}, limit=size)
    assert settings.size == settings.sizes["users"] == settings.limit == size
    assert type(settings.size) is type(size)


@pytest.mark.parametrize("field", ["size", "limit", "sizes"])
def test_sizes_out_of_range_are_refused_by_their_value(field: str) -> None:
    def refused(size: Any, message: str) -> None:
        with pytest.raises(ValidationError, match=message) as refusal:
            CacheSettings(**{field: {"users": size} if field == "sizes" else size})
        assert field in str(refusal.value)

    for rows in (0, -5):
        refused(rows, f"a cache needs at least 1 row, not {rows}")
    for share in ("0%", "0.0 %", "100.5%", "1000%"):
        refused(share, f"a share of the rows is more than 0% and at most 100%, not {share}")
    for other in (2.5, [1], {"rows": 5}):
        refused(other, r"give rows \(100000\), a share of the rows")


def test_the_cache_has_defaults_and_takes_only_what_it_knows() -> None:
    settings = CacheSettings()
    assert (settings.size, settings.sizes, settings.limit, settings.warm_start) == ("10%", {}, None, False)
    assert (settings.transfer, settings.kernels) == ("auto", "auto")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"transfer": "copy"}, "'auto', 'staging' or 'zero_copy'"),
        ({"kernels": "cuda"}, "'auto', 'triton', 'torch' or 'fbgemm'"),
        ({"slots": 5}, "slots\n.*Extra inputs are not permitted"),
        ({"size": None}, r"give rows \(100000\), a share of the rows"),
        ({"warm_start": "perhaps"}, "valid boolean"),
    ]
    for given_settings, message in wrong:
        with pytest.raises(ValidationError, match=message):
            CacheSettings(**given_settings)
    with pytest.raises(ValidationError, match="frozen"):
        settings.size = 5  # type: ignore[misc]


def test_the_tables_have_defaults() -> None:
    settings = EmbeddingSettings()
    assert (settings.placement, settings.placements, settings.look_ahead) == ("cached", {}, 4)
    assert (settings.device_memory, settings.memory_limit, settings.threads) == (None, None, None)
    assert (settings.invalid_ids, settings.fallback_row) == ("error", 0)
    assert settings.cache == CacheSettings() and settings.optimizer == SparseOptimizerSettings()


def test_memory_is_given_in_bytes_or_with_a_unit() -> None:
    settings = EmbeddingSettings(device_memory="8GiB", memory_limit=4096)
    assert (settings.device_memory, settings.memory_limit) == (8 * 2**30, 4096)


@pytest.mark.parametrize("field", ["device_memory", "memory_limit"])
@pytest.mark.parametrize("memory", ["much", "-1", -1, "8 gigs", "1,000,000", "8GiB or so"])
def test_what_is_no_amount_of_memory_is_refused(field: str, memory: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        EmbeddingSettings(**{field: memory})


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"threads": 0}, "threads\n.*greater than or equal to 1"),
        ({"look_ahead": -1}, "look_ahead\n.*greater than or equal to 0"),
        ({"fallback_row": -1, "invalid_ids": "fallback"}, "fallback_row\n.*greater than or equal to 0"),
        ({"placement": "disk"}, "'auto', 'device', 'cached' or 'host'"),
        ({"placements": {"users": "disk"}}, r"placements\.users\n.*'auto', 'device', 'cached' or 'host'"),
        ({"invalid_ids": "skip"}, "'error', 'modulo' or 'fallback'"),
        ({"cache": {"size": "lots"}}, r"cache\.size\n.*not 'lots'"),
        ({"cache": {"sizes": {"users": 0}}}, r"cache\.sizes\.users\n.*at least 1 row, not 0"),
        ({"optimizer": {"name": "lamb"}}, r"optimizer\.name\n"),
        ({"tables": 3}, "tables\n.*Extra inputs are not permitted"),
    ],
)
def test_settings_out_of_range_are_refused_where_they_stand(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EmbeddingSettings(**given_settings)


@pytest.mark.parametrize("invalid_ids", ["error", "modulo"])
def test_a_fallback_row_that_would_not_be_used_is_refused(invalid_ids: Any) -> None:
    with pytest.raises(ValidationError, match="fallback_row has a meaning only with invalid_ids: fallback"):
        EmbeddingSettings(fallback_row=3, invalid_ids=invalid_ids)
    assert EmbeddingSettings(fallback_row=3, invalid_ids="fallback").fallback_row == 3
    assert EmbeddingSettings(fallback_row=0, invalid_ids=invalid_ids).fallback_row == 0


@pytest.mark.parametrize(
    "given_settings",
    [
        {"learning_rate": -0.1},
        {"learning_rate": math.inf},
        {"learning_rate": math.nan},
        {"weight_decay": -1.0},
        {"weight_decay": math.inf},
        {"eps": 0.0},
        {"beta1": 1.0},
        {"beta1": -0.1},
        {"beta2": 1.0},
        {"initial_accumulator": -1.0},
        {"momentum": 0.9},
    ],
    ids=str,
)
def test_an_optimizer_that_cannot_be_is_refused(given_settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(given_settings))):
        SparseOptimizerSettings(**given_settings)


def test_an_optimizer_may_stand_still() -> None:
    settings = SparseOptimizerSettings(learning_rate=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0)
    assert (settings.name, settings.learning_rate, settings.beta1) == ("rowwise_adagrad", 0.0, 0.0)


@pytest.mark.parametrize("size", [0, -1, True, "0B", "0 GiB", "0%"])
def test_a_cache_of_nothing_is_refused(size: int | str) -> None:
    with pytest.raises(ValidationError, match="size"):
        CacheSettings(size=size)
