"""DLRM's sparse part without its copies."""

from __future__ import annotations

from torch import Tensor
from torchrec.models.dlrm import SparseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class DirectSparseArch(SparseArch):
    """TorchRec's ``SparseArch``, for a collection whose output already has the features in order.

    TorchRec's takes the output apart by feature and concatenates it again, which copies it forward and backward.
    Measured on 2 cores (26 features of dim 64, batch 2048): 12 ms of a step of 155 ms.
    """

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """The pooled vectors, float32 ``[B, F, D]``."""
        return self.embedding_bag_collection(features).values().reshape(-1, self.F, self.D)
