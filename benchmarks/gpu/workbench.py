"""The contenders of a run, made when they are first needed, and their turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.click_batches import ClickBatches, table_configs
from benchmarks.gpu.contenders import Contender, Ours
from benchmarks.gpu.options import Options
from recsys_offload.embedding.config import TransferName
from recsys_offload.embedding.runtime import runtime_for
from recsys_offload.embedding.statistics import CacheCounts
from recsys_offload.embedding.uses import count_uses

# Untimed steps at the beginning of a turn, beyond those that are looked ahead: the pipeline has to be in its stride.
STEPS_BEFORE = 4


@dataclass(frozen=True)
class Turn:
    """Who trains in a turn, and how far ahead it looks."""

    contender: Contender
    depth: int


@dataclass
class Times:
    """What one contender's turns took.

    Attributes:
        steps: timed, in a turn.
        seconds: of the timed steps of each turn.
        trained: steps of all turns but the first, timed or not.
        counts: what the cache did in them.
    """

    steps: int
    seconds: list[float] = field(default_factory=list)
    trained: int = 0
    counts: CacheCounts = field(default_factory=CacheCounts)

    @property
    def ms_per_step(self) -> float:
        return 1e3 * statistics.median(self.seconds) / self.steps

    def per_step(self, amount: float) -> float:
        return amount / self.trained


class Workbench:
    """Batches and contenders, shared by the parts that train."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options = options
        self.device = device
        self._synchronize: Callable[[], None] = runtime_for(device).synchronize
        self._contenders: dict[tuple[float | None, TransferName], Contender] = {}
        self._temporary = tempfile.TemporaryDirectory() if options.rehearse else None
        self._first = 0

    @property
    def _rounds(self) -> int:
        return max(1, self.options.steps // self.options.block_steps)

    @property
    def _turn_batches(self) -> int:
        """Batches of one turn: untimed ones, timed ones, and those looked ahead at while the last was timed."""
        return STEPS_BEFORE + self.options.depth + self.options.block_steps + self.options.depth

    @cached_property
    def batches(self) -> ClickBatches:
        """For two parts with a round to begin with each."""
        folder = self.options.data if self._temporary is None else Path(self._temporary.name)
        return ClickBatches(self.options, folder, 2 * (1 + self._rounds) * self._turn_batches, self.device)

    @cached_property
    def _uses(self) -> dict[str, np.ndarray]:
        return count_uses(self.batches.warming, table_configs(self.options))

    def ours(self, share: float | None, transfer: TransferName) -> Contender:
        """Our collection; the same one for every part.

        Raises:
            MemoryError: the tables do not fit.
        """
        key = (share, transfer)
        if key not in self._contenders:
            self._contenders[key] = Ours(self.options, self.device, share, transfer, self._uses)
        return self._contenders[key]

    def alternate(self, turns: dict[str, Turn], budget: Budget) -> dict[str, Times]:
        """Lets all take turns on the same batches, each round beginning with another, as long as the time allows.

        Args:
            turns: by name.
            budget: no further round is begun that would not fit; the first two, one of them untimed, always are.
        """
        names: Sequence[str] = list(turns)
        times = {name: Times(self.options.block_steps) for name in names}
        longest = 0.0
        for number in range(1 + self._rounds):
            if number > 1 and budget.left < longest:
                break
            start = time.monotonic()
            turn_first = number % len(names)
            for name in [*names[turn_first:], *names[:turn_first]]:
                self._take(turns[name], times[name], counted=number > 0)
            self._first += self._turn_batches
            longest = max(longest, time.monotonic() - start) if number > 0 else 0.0
        return times

    def _take(self, turn: Turn, times: Times, *, counted: bool) -> None:
        before = turn.contender.counts()
        steps = turn.contender.steps(self.batches.block(self._first, self._turn_batches), turn.depth)
        for _ in range(STEPS_BEFORE + self.options.depth):
            next(steps)
        self._synchronize()
        start = time.perf_counter()
        for _ in range(self.options.block_steps):
            next(steps)
        self._synchronize()
        seconds = time.perf_counter() - start
        for _ in steps:  # the batches that were looked at ahead
            pass
        if counted:
            times.seconds.append(seconds)
            times.trained += self._turn_batches
            times.counts = times.counts.plus(turn.contender.counts().since(before))

    def close(self) -> None:
        """Ends all threads and removes what was written for a rehearsal."""
        for contender in self._contenders.values():
            contender.close()
        if "batches" in self.__dict__:
            self.batches.close()
        if self._temporary is not None:
            self._temporary.cleanup()
