"""Learning-rate schedules, one for the dense side and one for the tables, each a factor per step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field, model_validator
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recsys_offload.settings import Rate, Settings

__all__ = ["ScheduleSettings", "SchedulesSettings", "build_schedule", "schedule_factor"]

_OPTIONS = {
    "constant": set[str](),
    "polynomial": {"decay_steps", "final_factor", "power"},
    "cosine": {"decay_steps", "final_factor"},
    "step": {"milestones", "step_factor"},
}


class ScheduleSettings(Settings):
    """How a learning rate changes from step to step: a linear warm-up, then a decay."""

    name: Literal["constant", "polynomial", "cosine", "step"] = Field(
        "constant",
        description="What follows the warm-up: constant; polynomial (with power 1: linear) or cosine decay down to "
        "final_factor; step (times step_factor at each milestone).",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises linearly to its full value.")
    decay_steps: int | None = Field(
        None, ge=1, description="Steps of the decay, counted from the end of the warm-up; by default to the last step."
    )
    final_factor: Rate = Field(0.0, description="What is left of the rate after the decay, as a share of it.")
    power: float = Field(1.0, gt=0.0, description="The exponent of the polynomial decay; 1 is linear.")
    milestones: list[int] = Field(
        default_factory=list, description="Steps at which the rate is multiplied by step_factor."
    )
    step_factor: float = Field(0.1, gt=0.0, description="The factor applied at each milestone.")

    @model_validator(mode="after")
    def _check_options_fit_the_name(self) -> ScheduleSettings:
        for other, options in _OPTIONS.items():
            for option in sorted(options - _OPTIONS[self.name]):
                default = ScheduleSettings.model_fields[option].get_default(call_default_factory=True)
                if getattr(self, option) != default:
                    raise ValueError(f"{option} belongs to name: {other}, and has no meaning with name: {self.name}")
        if self.name == "step" and (not self.milestones or sorted(set(self.milestones)) != self.milestones):
            raise ValueError(f"milestones must be ascending steps, at least one; got {self.milestones}")
        return self

    @property
    def ends_with_the_run(self) -> bool:
        """Whether the schedule depends on how many steps the run has."""
        return self.name in ("polynomial", "cosine") and self.decay_steps is None


class SchedulesSettings(Settings):
    """The learning-rate schedules of the two sides of the model."""

    dense: ScheduleSettings = Field(default_factory=ScheduleSettings, description="The schedule of the dense tower.")
    sparse: ScheduleSettings = Field(default_factory=ScheduleSettings, description="The schedule of the tables.")


def schedule_factor(settings: ScheduleSettings, total_steps: int) -> Callable[[int], float]:
    """The function from the step (0 is the first) to the factor on the learning rate.

    Args:
        total_steps: the steps of the whole run.

    Raises:
        ValueError: the warm-up leaves nothing of the run for the decay.
    """
    warmup = settings.warmup_steps
    decay = settings.decay_steps or 0
    if settings.ends_with_the_run:
        decay = total_steps - warmup
        if decay < 1:
            raise ValueError(
                f"warmup_steps is {warmup}, but the run has only {total_steps} steps: nothing is left to decay over"
            )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.name == "step":
            return settings.step_factor ** sum(step >= milestone for milestone in settings.milestones)
        if settings.name == "constant":
            return 1.0
        left = 1.0 - min(1.0, (step - warmup) / decay)
        shape = left**settings.power if settings.name == "polynomial" else 0.5 - 0.5 * math.cos(math.pi * left)
        return settings.final_factor + (1.0 - settings.final_factor) * shape

    return factor


def build_schedule(optimizer: Optimizer, settings: ScheduleSettings, total_steps: int) -> LambdaLR:
    """A scheduler that sets the rates of ``optimizer``; call its ``step()`` after each training step."""
    return LambdaLR(optimizer, schedule_factor(settings, total_steps))
