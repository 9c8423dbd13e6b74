"""How far training is: a live line on a terminal, plain lines at intervals elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

__all__ = ["Throughput", "TrainingProgress", "format_duration"]

_WINDOW_SECONDS = 20.0
# Between two changes of the live line.
_LIVE_SECONDS = 0.5


class Throughput:
    """Samples per second over the last seconds of training; time spent in ``paused`` does not count.

    Nor does the first step, in which kernels may be compiled.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._paused = 0.0
        self._marks: deque[tuple[float, int, int]] = deque()

    def _now(self) -> float:
        return self._clock() - self._paused

    def restart(self, step: int) -> None:
        """Forget what was, and count from the end of the step after ``step`` on."""
        self._marks.clear()
        self._marks.append((self._now(), step, 0))
        self._counts = False

    def update(self, step: int, samples: int) -> None:
        """One more step, with so many samples, is done."""
        now = self._now()
        if not self._counts:
            self._marks.clear()
            self._marks.append((now, step, 0))
            self._counts = True
            return
        self._marks.append((now, step, self._marks[-1][2] + samples))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
            self._marks.popleft()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent in the block out."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    @property
    def samples_per_second(self) -> float:
        """Over the window; 0 before the second step."""
        (start, _, before), (end, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def seconds_for(self, steps: int) -> float | None:
        """The time that so many steps will take at the present rate; None before the second step."""
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) * steps if last > first else None


class TrainingProgress:
    """Shows the progress of one run on ``console``. Use it as a context manager."""

    def __init__(self, console: Console, *, step: int, total_steps: int, plain_interval_seconds: float) -> None:
        """Args:
        step: the steps that are already done.
        total_steps: the steps of the whole run.
        plain_interval_seconds: the least time between two lines when ``console`` is no terminal.
        """
        self._console = console
        self._total = total_steps
        self._interval = plain_interval_seconds
        self._next_line = 0.0
        self.throughput = Throughput()
        self.throughput.restart(step)
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(TextColumn("{task.description}"), BarColumn(), console=console)
            self._task: TaskID = self._live.add_task("starting", total=total_steps, completed=step)

    def update(
        self, *, step: int, epoch: int, loss: float, samples: int, remark: Callable[[], str] = lambda: ""
    ) -> None:
        """One more step is done.

        Args:
            epoch: the epoch that the step belongs to, from 1.
            loss: as shown.
            samples: the samples of this step.
            remark: gives what else the line says; asked only when a line is shown.
        """
        self.throughput.update(step, samples)
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + (self._interval if self._live is None else _LIVE_SECONDS)
        line = self._line(step, epoch, loss) + remark()
        if self._live is not None:
            self._live.update(self._task, completed=step, description=line)
        else:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def message(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Show that something else than training goes on, and leave its time out of the rate."""
        if self._live is not None:
            self._live.update(self._task, description=activity)
        with self.throughput.paused():
            yield

    def _line(self, step: int, epoch: int, loss: float) -> str:
        rate = self.throughput.samples_per_second
        left = self.throughput.seconds_for(max(0, self._total - step))
        return (
            f"epoch {epoch}  step {step:,}/{self._total:,}  loss {loss:.4f}"
            f"  {f'{rate:,.0f}' if rate else '?'} samples/s  {'?' if left is None else format_duration(left)} left"
        )

    def __enter__(self) -> TrainingProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def format_duration(seconds: float) -> str:
    """``seconds`` as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
