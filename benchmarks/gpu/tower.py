"""The dense part of DLRM as a plain module, and a step of its training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from recsys_offload.data import Batch
from recsys_offload.data.criteo import DENSE_COLUMNS, SPARSE_COLUMNS

BOTTOM_LAYERS = (512, 256)
TOP_LAYERS = (512, 512, 256)
LEARNING_RATE = 0.01


def _layers(widths: Sequence[int], *, activate_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if activate_last else layers[:-1]))


class Tower(nn.Module):
    """A multi-layer perceptron over the dense columns, the dot products of all pairs of vectors, and another one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim
        vectors = SPARSE_COLUMNS + 1
        self.bottom = _layers([DENSE_COLUMNS, *BOTTOM_LAYERS, dim], activate_last=True)
        self.top = _layers([dim + vectors * (vectors - 1) // 2, *TOP_LAYERS, 1], activate_last=False)
        self.pairs: Tensor
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """The logits, float32 ``[B]``, of dense columns ``[B, 13]`` and pooled vectors ``[B, 26 * dim]``."""
        embedded = self.bottom(dense)
        vectors = torch.cat([embedded[:, None], pooled.reshape(len(pooled), -1, self._dim)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([embedded, products], dim=1)).squeeze(1)


class DenseTraining:
    """A tower with its optimizer; every one begins with the same weights."""

    def __init__(self, dim: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._tower = Tower(dim).to(device)
        self._optimizer = torch.optim.Adagrad(self._tower.parameters(), lr=LEARNING_RATE)

    def forward(self, batch: Batch, pooled: Tensor) -> Tensor:
        """The loss of a batch whose dense columns are on the device."""
        logits = self._tower(batch.dense, pooled)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def backward(self, loss: Tensor) -> None:
        """The backward pass, in which tables are updated, and the step of the tower."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
