"""What the cache did: counts in total, and, on request, when each lane worked."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields


@dataclass
class CacheCounts:
    """Sums since the beginning of a run.

    Attributes:
        batches: that had their rows put into slots.
        rows: distinct rows that those batches used.
        hits: how many of them had a slot already.
        fetched: rows fetched from the host.
        written_back: rows written back to it.
        fetched_bytes: of the rows fetched, weights and state.
        written_back_bytes: of the rows written back.
        stalled_seconds: that training waited for rows.
        waiting_seconds: that training waited for the loader.
        moving_seconds: that rows were on their way, whether training waited or not.
        grown: how often the slots had to grow.
    """

    batches: int = 0
    rows: int = 0
    hits: int = 0
    fetched: int = 0
    written_back: int = 0
    fetched_bytes: int = 0
    written_back_bytes: int = 0
    stalled_seconds: float = 0.0
    waiting_seconds: float = 0.0
    moving_seconds: float = 0.0
    grown: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits among the rows used; 1 before there are any."""
        return self.hits / self.rows if self.rows else 1.0

    @property
    def hidden_seconds(self) -> float:
        """How long rows moved while training went on."""
        return max(0.0, self.moving_seconds - self.stalled_seconds)

    def values(self) -> dict[str, float]:
        """All of it by name, what is derived from the counts included."""
        return {"hit_rate": self.hit_rate, "hidden_seconds": self.hidden_seconds, **asdict(self)}

    def since(self, earlier: CacheCounts) -> CacheCounts:
        """What has been added since ``earlier``."""
        return CacheCounts(**{one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)})

    def plus(self, other: CacheCounts) -> CacheCounts:
        """The sums of both."""
        return CacheCounts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


@dataclass(frozen=True)
class Span:
    """Work in one lane.

    Attributes:
        lane: the thread or stream.
        name: of the work.
        start: seconds, as ``time.perf_counter`` counts them.
        end: likewise.
    """

    lane: str
    name: str
    start: float
    end: float


class CacheStatistics:
    """Collects counts, and spans while ``tracing``. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CacheCounts()
        self._spans: list[Span] = []
        self.tracing = False

    def counts(self) -> CacheCounts:
        """A copy of the counts so far."""
        with self._lock:
            return CacheCounts(**asdict(self._counts))

    def add(self, **amounts: int | float) -> None:
        """Adds to counts, by their names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def span(self, lane: str, name: str, start: float, end: float) -> None:
        """Notes work in a lane, if spans are collected."""
        if self.tracing:
            with self._lock:
                self._spans.append(Span(lane, name, start, end))

    def moved(self, name: str, start: float, end: float) -> None:
        """Notes that rows moved."""
        self.add(moving_seconds=end - start)
        self.span("move rows", name, start, end)

    def spans(self) -> list[Span]:
        """Takes the spans collected so far."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans
