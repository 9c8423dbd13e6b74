"""When each lane of the cache worked: as a trace for a viewer, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from recsys_offload.durable_files import durable_path, write_json
from recsys_offload.embedding.statistics import Span

__all__ = ["draw_timeline", "write_chrome_trace"]

# What the loop waits for is drawn in a colour of its own: it is what one looks for.
WAITING = "#c44e52"
COLOURS = ("#4c72b0", "#55a868", "#8172b3", "#ccb974", "#64b5cd", "#937860")
SECONDS_DRAWN = 2.0


def _lanes(spans: Sequence[Span]) -> list[str]:
    """The lanes, the training loop's first, then in the order in which a batch goes through them."""
    order = ("training", "plan ahead", "move ahead", "move rows")
    names = {span.lane for span in spans}
    return [lane for lane in order if lane in names] + sorted(names - set(order))


def write_chrome_trace(spans: Sequence[Span], path: Path) -> None:
    """Writes spans in the Trace Event format, for https://ui.perfetto.dev or chrome://tracing.

    Args:
        spans: of all lanes, in any order.
        path: of the JSON file; it is replaced as a whole.
    """
    lanes = {lane: number for number, lane in enumerate(_lanes(spans))}
    origin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": 0,
            "tid": lanes[span.lane],
            "ts": (span.start - origin) * 1e6,
            "dur": (span.end - span.start) * 1e6,
        }
        for span in spans
    ]
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})


def draw_timeline(spans: Sequence[Span], path: Path) -> None:
    """Draws the last two seconds of the lanes, one below the other, as a PNG.

    Args:
        spans: of all lanes, at least one.
        path: of the PNG file; it is replaced as a whole.
    """
    end = max(span.end for span in spans)
    begin = max(min(span.start for span in spans), end - SECONDS_DRAWN)
    lanes = _lanes(spans)
    names = list(dict.fromkeys(_kind(span.name) for span in spans if not span.name.startswith("wait")))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(12, 1 + 0.6 * len(lanes)), layout="constrained")
        axes = figure.add_subplot()
        seen: set[str] = set()
        for row, lane in enumerate(lanes):
            for span in spans:
                if span.lane != lane or span.end < begin:
                    continue
                waiting = span.name.startswith("wait")
                kind = span.name if waiting else _kind(span.name)
                axes.barh(
                    row,
                    (span.end - max(span.start, begin)) * 1e3,
                    left=(max(span.start, begin) - begin) * 1e3,
                    height=0.7,
                    color=WAITING if waiting else colours[kind],
                    label="_" + kind if kind in seen else kind,
                )
                seen.add(kind)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlim(0, (end - begin) * 1e3)
        axes.set_xlabel("milliseconds")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        with durable_path(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)


def _kind(name: str) -> str:
    """What is done, whichever batch it is done for: ``admit batch 7`` is ``admit batch``."""
    return name.rstrip("0123456789 ")
