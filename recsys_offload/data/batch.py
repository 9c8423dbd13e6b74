"""What the data side hands to the model: one batch of examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class Batch:
    """One batch of B examples.

    Attributes:
        dense: float32 ``[B, F]``, transformed and free of nulls; F may be 0. It is a view of decoded columns, so its
            memory runs down the columns.
        sparse: a ``KeyedJaggedTensor`` of int64 ids, its keys in the order of the settings, B bags per key.
        labels: float32 ``[B]``; empty (``[0]``) where the data has no label column.
        weights: float32 ``[B]`` sample weights, or None.
        origin: where the first row came from (file, row group, row), for error messages.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor | None = None
    origin: str = ""

    def __len__(self) -> int:
        return self.dense.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch with its dense tensors on ``device``. The ids stay on the host, where the tables are."""
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )
