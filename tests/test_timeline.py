import json
from pathlib import Path

import matplotlib.image

from recsys_offload.embedding.statistics import Span
from recsys_offload.timeline import draw_timeline, write_chrome_trace

SPANS = [
    Span("move rows", "fetch", 10.5, 10.75),
    Span("training", "lookup", 10.0, 10.25),
    Span("move ahead", "admit batch 12", 10.25, 10.5),
    Span("training", "wait for rows", 10.25, 10.75),
]


def test_a_trace_has_one_thread_per_lane_and_times_in_microseconds_from_the_first_span(tmp_path: Path) -> None:
    write_chrome_trace(SPANS, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(lanes.values()) == ["training", "move ahead", "move rows"]
    spans = [(lanes[event["tid"]], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [
        ("move rows", "fetch", 500_000, 250_000),
        ("training", "lookup", 0, 250_000),
        ("move ahead", "admit batch 12", 250_000, 250_000),
        ("training", "wait for rows", 250_000, 500_000),
    ]


def test_the_picture_shows_waits_in_their_own_colour(tmp_path: Path) -> None:
    def red(spans: list[Span]) -> int:
        draw_timeline(spans, tmp_path / "timeline.png")
        picture = matplotlib.image.imread(tmp_path / "timeline.png")
        return int(((picture[..., 0] > 0.7) & (picture[..., 1] < 0.4)).sum())

    without = [span for span in SPANS if not span.name.startswith("wait")]
    assert red(SPANS) > red(without) + 100


def test_only_the_last_two_seconds_are_drawn(tmp_path: Path) -> None:
    long_ago = Span("training", "wait for the loader", 1.0, 2.0)
    draw_timeline(SPANS, tmp_path / "short.png")
    draw_timeline([*SPANS, long_ago], tmp_path / "long.png")
    shape = [matplotlib.image.imread(tmp_path / name).shape[0] for name in ("short.png", "long.png")]
    assert shape[0] == shape[1]
