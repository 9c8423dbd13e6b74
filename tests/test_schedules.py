"""Learning-rate schedules: their shape, and that they drive an optimizer step by step."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from recsys_offload.schedules import ScheduleSettings, build_schedule, schedule_factor


def test_constant_after_a_linear_warmup() -> None:
    factor = schedule_factor(ScheduleSettings(warmup_steps=4), 12)
    assert [factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_final_factor_with_the_run() -> None:
    factor = schedule_factor(ScheduleSettings(name="polynomial", warmup_steps=2, final_factor=0.5), 12)
    assert factor(1) == 1.0 and factor(2) == 1.0
    assert factor(7) == pytest.approx(0.75)
    assert factor(12) == 0.5 and factor(50) == 0.5


def test_polynomial_and_cosine_shapes() -> None:
    square = schedule_factor(ScheduleSettings(name="polynomial", decay_steps=10, power=2.0), 12)
    assert square(5) == pytest.approx(0.25)
    cosine = schedule_factor(ScheduleSettings(name="cosine", decay_steps=10), 12)
    assert [cosine(step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert cosine(2) == pytest.approx(0.5 + 0.5 * math.cos(math.pi * 0.2))


def test_step_multiplies_at_each_milestone() -> None:
    factor = schedule_factor(ScheduleSettings(name="step", milestones=[3, 5], step_factor=0.5), 12)
    assert [factor(step) for step in range(7)] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_warmup_must_leave_steps_for_the_decay() -> None:
    with pytest.raises(ValueError, match="warmup_steps is 20, but the run has only 20 steps"):
        schedule_factor(ScheduleSettings(name="cosine", warmup_steps=20), 20)


@pytest.mark.parametrize(
    "settings",
    [{"name": "constant", "power": 2.0}, {"name": "cosine", "milestones": [3]}, {"name": "constant", "decay_steps": 3}],
)
def test_options_of_another_schedule_are_refused(settings: dict) -> None:
    with pytest.raises(ValidationError, match="has no meaning with name"):
        ScheduleSettings(**settings)


def test_milestones_must_ascend() -> None:
    with pytest.raises(ValidationError, match="ascending"):
        ScheduleSettings(name="step", milestones=[5, 3])


def test_it_sets_the_rate_of_the_optimizer_per_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = build_schedule(optimizer, ScheduleSettings(warmup_steps=2, name="cosine", decay_steps=2), 12)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.2, 0.0])
