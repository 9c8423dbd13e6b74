"""Which evaluation is the best, and when training stops."""

from __future__ import annotations

import math

from recsys_offload.early_stopping import EarlyStopping


def test_it_keeps_the_best_and_stops_after_patience() -> None:
    stopping = EarlyStopping("auc", patience=2)
    assert stopping.update(10, {"auc": 0.6, "log_loss": 0.7})
    assert stopping.update(20, {"auc": 0.7, "log_loss": 0.9})
    assert not stopping.update(30, {"auc": 0.7, "log_loss": 0.1})  # equal is not better
    assert not stopping.should_stop
    assert not stopping.update(40, {"auc": 0.65, "log_loss": 0.1})
    assert stopping.should_stop
    assert stopping.best_step == 20 and stopping.best_metrics == {"auc": 0.7, "log_loss": 0.9}


def test_a_loss_is_better_when_lower() -> None:
    stopping = EarlyStopping("log_loss", patience=None)
    stopping.update(1, {"log_loss": 0.7})
    assert stopping.update(2, {"log_loss": 0.6})
    for step in range(3, 50):
        assert not stopping.update(step, {"log_loss": 0.8})
    assert not stopping.should_stop and stopping.best_step == 2


def test_an_undefined_metric_is_never_the_best() -> None:
    stopping = EarlyStopping("auc", patience=1)
    assert not stopping.update(1, {"auc": math.nan})
    assert stopping.best_step is None and stopping.should_stop
    assert stopping.update(2, {"auc": 0.5}) and not stopping.should_stop
