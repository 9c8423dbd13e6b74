"""Progress off a terminal and on one."""

from __future__ import annotations

import io
import re

from rich.console import Console

from recsys_offload.progress import Throughput, TrainingProgress, format_duration


def _run(console: Console, interval: float) -> None:
    with TrainingProgress(console, step=0, total_steps=40, plain_interval_seconds=interval) as progress:
        for step in range(1, 11):
            progress.update(step=step, epoch=1, loss=0.5, samples=32)
        with progress.during("evaluating"):
            progress.message("step 10: auc 0.7")


def test_plain_lines_when_not_on_a_terminal() -> None:
    stream = io.StringIO()
    _run(Console(file=stream, width=40), interval=0.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11 and lines[-1] == "step 10: auc 0.7"
    assert re.fullmatch(r"epoch 1  step 5/40  loss 0\.5000  [\d,]+ samples/s  \d:\d\d:\d\d left", lines[4])
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_keep_their_distance() -> None:
    stream = io.StringIO()
    _run(Console(file=stream), interval=1000.0)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_live_line_on_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with TrainingProgress(console, step=9, total_steps=40, plain_interval_seconds=0.0) as progress:
        progress.update(step=10, epoch=1, loss=0.5, samples=32)
    assert "epoch 1  step 10/40  loss 0.5000" in stream.getvalue()


def test_paused_time_does_not_count() -> None:
    now = [0.0]
    throughput = Throughput(clock=lambda: now[0])
    throughput.restart(0)
    now[0] = 100.0  # the first step's kernels were compiled
    throughput.update(1, 10)
    assert throughput.samples_per_second == 0.0 and throughput.seconds_for(4) is None
    now[0] = 102.0
    throughput.update(2, 10)
    with throughput.paused():
        now[0] = 1000.0
    now[0] += 2.0
    throughput.update(3, 10)
    assert throughput.samples_per_second == 5.0
    assert throughput.seconds_for(4) == 8.0


def test_durations() -> None:
    assert format_duration(3725.2) == "1:02:05"
