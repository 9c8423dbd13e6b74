"""Metrics against TorchMetrics, TorchRec and the definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.ne import compute_ne, get_ne_states
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.data.batch import Batch
from recsys_offload.metrics import BinaryMetrics, evaluate_batches, weighted_auc


def _data(count: int = 500, levels: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(levels, (count,), generator=generator) / levels * 4 - 2  # many ties
    labels = (torch.rand(count, generator=generator) < logits.sigmoid()).float()
    weights = torch.randint(0, 4, (count,), generator=generator).float()
    return logits, labels, weights


def test_auc_counts_pairs_with_ties_and_weights() -> None:
    logits, labels, weights = _data(120, 15)
    positive, negative = labels == 1, labels == 0
    difference = logits[positive][:, None] - logits[negative][None, :]
    pair_weights = weights[positive][:, None].double() * weights[negative][None, :].double()
    wins = (difference > 0).double() + 0.5 * (difference == 0).double()
    expected = ((wins * pair_weights).sum() / pair_weights.sum()).item()
    assert weighted_auc(logits, labels, weights) == pytest.approx(expected, abs=1e-12)


def test_unweighted_auc_equals_torchmetrics() -> None:
    logits, labels, _ = _data()
    expected = binary_auroc(logits.sigmoid(), labels.long()).item()
    assert weighted_auc(logits, labels, torch.ones(len(labels))) == pytest.approx(expected, abs=1e-6)


def test_batches_give_the_values_of_torchrec_over_the_whole_pass() -> None:
    logits, labels, weights = _data()
    metrics = BinaryMetrics()
    for part in torch.arange(len(labels)).split(37):
        metrics.update(logits[part], labels[part], weights[part])
    result = metrics.compute()
    probabilities = logits.double().sigmoid()
    states = get_ne_states(labels.double(), probabilities.clone(), weights.double(), eta=1e-12)
    ne = compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        states["pos_labels"],
        states["neg_labels"],
        eta=1e-12,
    )
    calibration = get_calibration_states(labels.double(), probabilities, weights.double())
    assert result["normalized_entropy"] == pytest.approx(ne.item(), rel=1e-9)
    assert result["calibration"] == pytest.approx(compute_calibration(*calibration.values()).item(), rel=1e-9)
    bits = states["cross_entropy_sum"] / states["weighted_num_samples"]
    assert result["log_loss"] == pytest.approx(bits.item() * math.log(2), rel=1e-9)
    assert result["examples"] == len(labels)


def test_a_confident_wrong_score_keeps_its_full_loss() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([100.0, -100.0]), torch.tensor([0.0, 0.0]))
    assert metrics.compute()["log_loss"] == pytest.approx(50.0)


def test_undefined_metrics_are_nan() -> None:
    metrics = BinaryMetrics()
    assert math.isnan(metrics.compute()["auc"])
    metrics.update(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.0]))
    result = metrics.compute()
    assert math.isnan(result["auc"]) and math.isnan(result["normalized_entropy"]) and math.isnan(result["calibration"])
    assert math.isfinite(result["log_loss"])
    assert math.isnan(weighted_auc(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]), torch.ones(2)))


class _Sum(nn.Module):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled()
        return dense.sum(1, keepdim=True)


def test_evaluate_batches_leaves_the_mode_as_it_was() -> None:
    sparse = KeyedJaggedTensor(keys=["a"], values=torch.zeros(2, dtype=torch.int64), lengths=torch.ones(2).int())
    batch = Batch(dense=torch.tensor([[1.0], [-1.0]]), sparse=sparse, labels=torch.tensor([1.0, 0.0]))
    model = _Sum().train()
    seen: list[int] = []
    result = evaluate_batches(model, [batch, batch], torch.device("cpu"), at_each_batch=lambda: seen.append(1))
    assert result["auc"] == 1.0 and result["examples"] == 4
    assert model.training and len(seen) == 2
