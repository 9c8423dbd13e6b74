"""What the embedding cache did in a run: for the progress line, the logs, the summary, and a trace on request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recsys_offload.embedding import HostCollection, Prefetcher
from recsys_offload.embedding.statistics import CacheCounts
from recsys_offload.timeline import draw_timeline, write_chrome_trace

__all__ = ["CacheReport"]

# Steps before a trace begins: the first ones compile kernels and fill the cache.
STEPS_BEFORE_TRACE = 20


class CacheReport:
    """Follows the caches of a model's collections through a run."""

    def __init__(
        self, collections: Sequence[HostCollection], prefetcher: Prefetcher, folder: Path, trace_steps: int | None
    ) -> None:
        """Args:
        collections: of the model.
        prefetcher: that feeds them.
        folder: where a trace is written.
        trace_steps: how many steps to trace; None for no trace.
        """
        self._collections = list(collections)
        self._prefetcher = prefetcher
        self._folder = folder
        self._trace_steps = trace_steps
        self._steps = 0
        self._tracing = False
        self._logged = CacheCounts()
        self._shown = CacheCounts()

    @property
    def has_cache(self) -> bool:
        """Whether any table is cached, so that there is something to tell."""
        return any(
            group.placement == "cached" for collection in self._collections for group in collection.tables.groups
        )

    def text(self) -> str:
        """For the progress line: hit rate and stalls since the last call; empty without a cache."""
        if not self.has_cache:
            return ""
        counts = self._prefetcher.counts()
        recent, self._shown = counts.since(self._shown), counts
        return f"  hits {recent.hit_rate:.1%}  stalled {recent.stalled_seconds:.2f}s"

    def values(self) -> dict[str, float]:
        """For the logs: counts and seconds since the last call, and how full slots and queues are now."""
        if not self.has_cache:
            return {}
        counts = self._prefetcher.counts()
        recent, self._logged = counts.since(self._logged), counts
        depths = self._prefetcher.queue_depths()
        caches = [
            group
            for collection in self._collections
            if collection.cache is not None
            for group in collection.cache.groups
            if group.group.placement == "cached"
        ]
        return {
            **{f"cache_{name}": value for name, value in recent.values().items()},
            "cache_slots": sum(group.directory.slots for group in caches),
            "cache_slots_held": sum(
                collection.cache.slots_held() for collection in self._collections if collection.cache is not None
            ),
            "queue_planned": depths["planned"],
            "queue_ready": depths["ready"],
        }

    def totals(self) -> dict[str, float] | None:
        """For the summary: counts and seconds of the whole run; None without a cache."""
        if not self.has_cache:
            return None
        return self._prefetcher.counts().values()

    def after_step(self) -> None:
        """Begins and ends the trace."""
        self._steps += 1
        if self._trace_steps is None:
            return
        if self._steps == STEPS_BEFORE_TRACE:
            self._set_tracing(True)
        elif self._steps == STEPS_BEFORE_TRACE + self._trace_steps:
            self.write_trace()

    def write_trace(self) -> None:
        """Ends the trace, if there is one, and writes it as ``timeline.json`` and ``timeline.png``."""
        if not self._tracing:
            return
        self._set_tracing(False)
        spans = [span for collection in self._collections for span in collection.statistics.spans()]
        if spans:
            spans.sort(key=lambda span: span.start)
            write_chrome_trace(spans, self._folder / "timeline.json")
            draw_timeline(spans, self._folder / "timeline.png")

    def _set_tracing(self, tracing: bool) -> None:
        self._tracing = tracing
        for collection in self._collections:
            collection.statistics.tracing = tracing
