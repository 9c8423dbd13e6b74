"""The optimizer of the dense tower: one of torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.optim import Optimizer

from recsys_offload.settings import LearningRate, Rate, Settings

__all__ = ["DenseOptimizerSettings", "build_dense_optimizer"]


class DenseOptimizerSettings(Settings):
    """The optimizer of the dense tower, as in torch.optim."""

    name: Literal["sgd", "adagrad", "adam", "adamw"] = Field("adam", description="Which optimizer of torch.optim.")
    learning_rate: LearningRate = Field(0.001, description="Learning rate of the dense tower, before any schedule.")
    weight_decay: float = Field(
        0.0, ge=0.0, description="L2 penalty in the gradient (sgd, adagrad, adam), or decoupled decay (adamw)."
    )
    momentum: Rate = Field(0.0, lt=1.0, description="Momentum (sgd).")
    beta1: Rate = Field(0.9, lt=1.0, description="Decay of the first moment (adam, adamw).")
    beta2: Rate = Field(0.999, lt=1.0, description="Decay of the second moment (adam, adamw).")
    eps: float = Field(1e-8, gt=0.0, description="Added to the root of the second moment (adagrad, adam, adamw).")

    @model_validator(mode="after")
    def _check_momentum_has_a_meaning(self) -> DenseOptimizerSettings:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum belongs to name: sgd, and has no meaning with name: {self.name}")
        return self


def build_dense_optimizer(settings: DenseOptimizerSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The torch optimizer that ``settings`` ask for, over ``parameters``."""
    common: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **common)
    if settings.name == "adagrad":
        return torch.optim.Adagrad(parameters, eps=settings.eps, **common)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(parameters, betas=(settings.beta1, settings.beta2), eps=settings.eps, **common)
