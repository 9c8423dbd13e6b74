"""Which evaluation was the best, and when to give up waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from recsys_offload.metrics import higher_is_better

__all__ = ["EarlyStopping"]


@dataclass
class EarlyStopping:
    """Follows one validation metric.

    Attributes:
        monitor: the metric.
        patience: evaluations without a better one after which to stop; None: never.
        best_step: the step of the best evaluation; None before the first in which the metric was defined.
        best_metrics: all metrics of the best evaluation.
        evaluations_since_best: how many evaluations were not better since.
    """

    monitor: str
    patience: int | None
    best_step: int | None = None
    best_metrics: Mapping[str, float] | None = None
    evaluations_since_best: int = 0

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take note of one evaluation; returns whether it is the best so far. An undefined metric is not better."""
        value = metrics[self.monitor]
        best = self.best_metrics[self.monitor] if self.best_metrics is not None else None
        sign = 1.0 if higher_is_better(self.monitor) else -1.0
        if math.isfinite(value) and (best is None or sign * value > sign * best):
            self.best_step, self.best_metrics, self.evaluations_since_best = step, dict(metrics), 0
            return True
        self.evaluations_since_best += 1
        return False

    @property
    def should_stop(self) -> bool:
        """Whether the patience is at its end."""
        return self.patience is not None and self.evaluations_since_best >= self.patience
