"""The sparse optimizers: the state they keep by row, and the numbers of one update."""

from __future__ import annotations

import math

import numpy as np
import torch

from recsys_offload.embedding.config import OptimizerName, SparseOptimizerSettings
from recsys_offload.embedding.kernels import layout

CODES: dict[OptimizerName, int] = {
    "sgd": layout.SGD,
    "adagrad": layout.ADAGRAD,
    "rowwise_adagrad": layout.ROWWISE_ADAGRAD,
    "adam": layout.ADAM,
}


def state_columns(name: OptimizerName, dim: int) -> dict[str, int]:
    """The state that a row carries behind its weights: name -> number of float32 values, in their order."""
    if name == "adagrad":
        return {"sum": dim}
    if name == "rowwise_adagrad":
        return {"sum": 1}
    if name == "adam":
        return {"exp_avg": dim, "exp_avg_sq": dim}
    return {}


def update_parameters(settings: SparseOptimizerSettings, learning_rate: float, step: int) -> np.ndarray:
    """The float32 numbers that the kernels need for update number ``step`` (from 1).

    Adam's bias correction is computed in double precision and folded into the step size, as in
    ``torch.optim.SparseAdam``.
    """
    step_size = learning_rate
    if settings.name == "adam":
        step_size *= math.sqrt(1 - settings.beta2**step) / (1 - settings.beta1**step)
    parameters = np.zeros(layout.UPDATE_PARAMETERS, np.float32)
    parameters[layout.STEP_SIZE] = step_size
    parameters[layout.WEIGHT_DECAY] = settings.weight_decay
    parameters[layout.EPS] = settings.eps
    parameters[layout.ONE_MINUS_BETA1] = 1 - settings.beta1
    parameters[layout.ONE_MINUS_BETA2] = 1 - settings.beta2
    return parameters


class InBackwardOptimizer(torch.optim.Optimizer):
    """The handle on an optimizer that runs inside the backward pass.

    It makes the learning rate visible where torch's schedulers look for it, ``param_groups[0]["lr"]``; the next
    backward pass reads it there. ``step`` and ``zero_grad`` have nothing left to do.
    """

    def __init__(self, settings: SparseOptimizerSettings, anchor: torch.Tensor) -> None:
        super().__init__([anchor], {"lr": settings.learning_rate})

    @property
    def learning_rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Does nothing: the tables were updated during the backward pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the tables' gradients are never kept."""
