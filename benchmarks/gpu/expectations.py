"""What was expected before anything was measured, beside what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.bus import BOTH, TO_DEVICE, TO_HOST
from benchmarks.gpu.overlap import lane_name
from benchmarks.gpu.report import UNMEASURED, is_measured
from benchmarks.gpu.row_moves import GATHER, STAGING, ZERO_COPY
from benchmarks.gpu.step import cache_name

Figures = Mapping[str, Any]
Finding = tuple[str, bool]
"""What was found, in words, and whether that is what was expected."""

THROUGHPUT_AT_10_PERCENT = 0.9
SHARE_OF_PINNED_COPIES = 0.7
BYTES_OF_A_LONG_ROW = 256
# Rows in a move from which on the cost of a launch no longer counts.
ROWS_OF_A_LARGE_MOVE = 10_000
HIDDEN_SHARE = 0.8
DEPTH = 4
# Staging is limited by the host's gather if it reaches so much of that.
LIMITED_SHARE = 0.7


@dataclass(frozen=True)
class Expectation:
    """Something that a part was expected to show.

    Attributes:
        part: that measures it.
        text: what was expected.
        find: what the part's figures say; None where they do not say it.
    """

    part: str
    text: str
    find: Callable[[Figures], Finding | None]


def _exact(figures: Figures) -> Finding | None:
    compared = figures["passed"] + len(figures["failures"])
    if not compared:
        return None
    return f"{figures['passed']} of {compared} comparisons", not figures["failures"]


def _throughput(figures: Figures) -> Finding | None:
    one = figures["contenders"].get(cache_name(10.0))
    if not is_measured(one) or one["throughput_over_resident"] is None:
        return None
    return f"{one['throughput_over_resident']:.2f}x", one["throughput_over_resident"] >= THROUGHPUT_AT_10_PERCENT


def _shares(figures: Figures, way: str, direction: str) -> list[float]:
    return [
        one["share_of_pinned_copies"]
        for one in figures["rows"]
        if (one["way"], one["direction"]) == (way, direction)
        and one["row_bytes"] >= BYTES_OF_A_LONG_ROW
        and one["rows"] >= ROWS_OF_A_LARGE_MOVE
    ]


def _zero_copy(figures: Figures) -> Finding | None:
    lowest = {}
    for direction in (TO_DEVICE, TO_HOST, BOTH):
        shares = _shares(figures, ZERO_COPY, direction)
        if not shares:
            return None
        lowest[direction] = min(shares)
    text = ", ".join(f"{share:.2f}x {direction}" for direction, share in lowest.items())
    return f"at least {text}", min(lowest.values()) >= SHARE_OF_PINNED_COPIES


def _staging(figures: Figures) -> Finding | None:
    staged, gathered = _shares(figures, STAGING, TO_DEVICE), _shares(figures, GATHER, TO_DEVICE)
    if not staged:
        return None
    part = sorted(one / other for one, other in zip(staged, gathered, strict=True))[len(staged) // 2]
    slower = max(gathered) < 1
    return f"{part:.2f}x of the gather alone, which reaches {max(gathered):.2f}x of pinned copies", (
        slower and part >= LIMITED_SHARE
    )


def _hidden(figures: Figures) -> Finding | None:
    one = figures["lanes"].get(lane_name(ZERO_COPY, DEPTH))
    if not is_measured(one) or one["hidden_by_step_times"] is None:
        return None
    return f"{one['hidden_by_step_times']:.0%}", one["hidden_by_step_times"] >= HIDDEN_SHARE


EXPECTATIONS = (
    Expectation("exactness", "every table and state equal to the bit", _exact),
    Expectation(
        "transfer",
        f"zero copy: at least {SHARE_OF_PINNED_COPIES}x of pinned copies, rows of {BYTES_OF_A_LONG_ROW}+ bytes, "
        f"{ROWS_OF_A_LARGE_MOVE:,}+ rows",
        _zero_copy,
    ),
    Expectation("transfer", "staging to the device: as fast as one host thread gathers, slower than the bus", _staging),
    Expectation("step", f"cache of 10%: at least {THROUGHPUT_AT_10_PERCENT}x of all-resident throughput", _throughput),
    Expectation(
        "overlap", f"zero copy, look-ahead {DEPTH}: at least {HIDDEN_SHARE:.0%} hidden, by step times", _hidden
    ),
)


def findings(parts: Mapping[str, Figures], *, rehearsal: bool) -> list[dict[str, Any]]:
    """Every expectation with what was found: ``met`` is None where it is unmeasured.

    Of a rehearsal, only exactness is a finding.
    """
    result = []
    for one in EXPECTATIONS:
        figures = parts[one.part]
        counts = is_measured(figures) and not (rehearsal and one.part != "exactness")
        finding = one.find(figures) if counts else None
        text, met = finding if finding is not None else (UNMEASURED, None)
        result.append({"part": one.part, "expected": one.text, "found": text, "met": met})
    return result
