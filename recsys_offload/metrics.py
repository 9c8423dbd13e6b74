"""Metrics of click models over a whole evaluation pass: AUC, log loss, normalized entropy, calibration.

TorchRec's and TorchMetrics' own functions were tried: TorchRec's AUC gives tied scores the order they happen to be
sorted in, TorchMetrics' takes no sample weights, and both take probabilities, where a confident float32 score is
already 0 or 1. So the sums are taken here from the logits in float64; the tests hold them against those libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys_offload.data.batch import Batch
from recsys_offload.faults import naming_batch

__all__ = ["METRICS", "BinaryMetrics", "evaluate_batches", "higher_is_better", "weighted_auc"]

METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")


def higher_is_better(metric: str) -> bool:
    """Whether a larger value of ``metric`` means a better model."""
    return metric == "auc"


class BinaryMetrics:
    """Collects the predictions of one pass (12 bytes per example on the host), then computes all metrics at once."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._weights: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch: float logits, labels in {0, 1} and optional sample weights, each ``[B]`` on any device."""
        self._logits.append(logits.detach().float().cpu())
        self._labels.append(labels.float().cpu())
        self._weights.append(torch.ones_like(self._labels[-1]) if weights is None else weights.float().cpu())

    def compute(self) -> dict[str, float]:
        """The metrics by name, and ``examples``; NaN where a metric is undefined (a single class, no examples).

        ``log_loss`` is in nats per unit of weight. ``normalized_entropy`` is it divided by the log loss of always
        predicting the mean label (below 1 is better than that). ``calibration`` is the ratio of predicted to actual
        positives (1 is right).
        """
        if not self._logits:
            return {**dict.fromkeys(METRICS, math.nan), "examples": 0}
        logits, labels, weights = (torch.cat(parts) for parts in (self._logits, self._labels, self._weights))
        wide_labels, wide_weights = labels.double(), weights.double()
        wide_logits = logits.double()
        losses = functional.binary_cross_entropy_with_logits(wide_logits, wide_labels, reduction="none")
        total = wide_weights.sum()
        positives = (wide_weights * wide_labels).sum()
        log_loss = (wide_weights * losses).sum() / total
        mean_label = positives / total
        entropy = torch.special.entr(mean_label) + torch.special.entr(1 - mean_label)
        return {
            "auc": weighted_auc(logits, labels, weights),
            "log_loss": log_loss.item(),
            "normalized_entropy": (log_loss / entropy).item() if entropy > 0 else math.nan,
            "calibration": ((wide_weights * wide_logits.sigmoid()).sum() / positives).item()
            if positives > 0
            else math.nan,
            "examples": len(labels),
        }


def weighted_auc(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    """The area under the ROC curve: how often a positive outscores a negative, ties counting one half.

    Args:
        scores: float ``[N]``.
        labels: ``[N]`` in {0, 1}.
        weights: ``[N]``, not negative; a pair counts with the product of its weights.

    Returns:
        The area; NaN where a score is NaN or one class has no weight.
    """
    if scores.isnan().any():
        return math.nan
    order = scores.argsort(stable=True)
    scores, labels, weights = scores[order], labels[order].double(), weights[order].double()
    is_last_of_tie = torch.ones(len(scores), dtype=torch.bool)
    torch.ne(scores[1:], scores[:-1], out=is_last_of_tie[:-1])
    positives = (weights * labels).cumsum(0)[is_last_of_tie]
    negatives = (weights * (1 - labels)).cumsum(0)[is_last_of_tie]
    if len(scores) == 0 or positives[-1] <= 0 or negatives[-1] <= 0:
        return math.nan
    zero = torch.zeros(1, dtype=torch.float64)
    area_above = torch.trapezoid(torch.cat((zero, positives)), torch.cat((zero, negatives)))
    return 1.0 - (area_above / (positives[-1] * negatives[-1])).item()


def evaluate_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    at_each_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The metrics of ``model`` over one pass of ``batches``; updates nothing, and leaves the model's mode as it was.

    Args:
        at_each_batch: called after each batch; what it raises ends the pass.
    """
    was_training = model.training
    model.eval()
    metrics = BinaryMetrics()
    try:
        with torch.no_grad():
            for batch in batches:
                moved = batch.to(device)
                with naming_batch(batch):
                    logits = model(moved.dense, moved.sparse)
                metrics.update(logits.squeeze(1), batch.labels, batch.weights)
                at_each_batch()
    finally:
        model.train(was_training)
    return metrics.compute()
