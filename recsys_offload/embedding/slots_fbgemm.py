"""Slots computed over by FBGEMM's table-batched embedding, where that is installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_offload.embedding.config import OptimizerName, SparseOptimizerSettings
from recsys_offload.embedding.kernels import device_torch, layout
from recsys_offload.embedding.slots import SlotBatch
from recsys_offload.embedding.slots_device import DeviceSlots, TensorSlots

# The optimizers that FBGEMM computes as we do, given the same state. Its Adam counts steps of its own.
OPTIMIZERS: dict[OptimizerName, str] = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}


class FbgemmSlots(TensorSlots):
    """One FBGEMM table whose rows are the slots; the features of a batch all read it.

    Its arithmetic fuses and orders sums in its own way: training through it gives the same bits for every cache size,
    but not the bits of the other kernels.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        count: int,
        features: int,
        optimizer: SparseOptimizerSettings,
        pooled: bool,
        device: torch.device,
    ) -> None:
        """Args:
            dim: weights per row, a multiple of 4.
            width: of a row with its state.
            count: slots.
            features: that read the group's tables.
            optimizer: of the tables.
            pooled: whether bags are pooled, or every id's row is wanted.
            device: of the slots.

        Raises:
            ValueError: FBGEMM is not installed, or cannot do what is asked.
        """
        if optimizer.name not in OPTIMIZERS:
            raise ValueError(
                f"cache.kernels: fbgemm has no {optimizer.name} like ours; take one of {list(OPTIMIZERS)}, or triton"
            )
        if optimizer.weight_decay:
            raise ValueError("cache.kernels: fbgemm ignores weight_decay on some devices; set it to 0, or take triton")
        if dim % 4:
            raise ValueError(f"cache.kernels: fbgemm needs an embedding_dim that is a multiple of 4, not {dim}")
        self.dim, self.width, self.device = dim, width, device
        self._features, self._optimizer, self._pooled = features, optimizer, pooled
        self._table = self._new_table(count)

    def _new_table(self, count: int) -> Any:
        try:
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                BoundsCheckMode,
                EmbeddingLocation,
                PoolingMode,
            )
        except ImportError as error:
            raise ValueError("cache.kernels: fbgemm is not installed; take triton or torch") from error
        on_host = self.device.type == "cpu"
        place = (
            (EmbeddingLocation.HOST, training.ComputeDevice.CPU)
            if on_host
            else (EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA)
        )
        return training.SplitTableBatchedEmbeddingBagsCodegen(
            [(count, self.dim, *place)],
            feature_table_map=[0] * self._features,
            optimizer=EmbOptimType[OPTIMIZERS[self._optimizer.name]],
            eps=self._optimizer.eps,
            learning_rate=self._optimizer.learning_rate,
            pooling_mode=PoolingMode.SUM if self._pooled else PoolingMode.NONE,
            bounds_check_mode=BoundsCheckMode.NONE,
            stochastic_rounding=False,
            device=self.device,
        )

    def _arrays(self) -> list[Tensor]:
        """Weights ``[S, dim]`` and, if there is any, state ``[S, W - dim]``: views without version counters."""
        kind = "host" if self.device.type == "cpu" else "dev"
        arrays = [getattr(self._table, f"weights_{kind}").data.view(-1, self.dim)]
        if self.width > self.dim:
            state = getattr(self._table, f"momentum1_{kind}").data
            arrays.append(state[: self.count * (self.width - self.dim)].view(-1, self.width - self.dim))
        return arrays

    @property
    def count(self) -> int:
        return int(self._table.embedding_specs[0][0])

    def grow(self, count: int) -> None:
        old = self._arrays()
        self._table = self._new_table(count)
        for new_array, array in zip(self._arrays(), old, strict=True):
            new_array[: len(array)] = array

    def read(self, slots: Tensor) -> Tensor:
        return torch.cat([array[slots] for array in self._arrays()], dim=1)

    def write(self, slots: Tensor, records: Tensor) -> None:
        for array, part in zip(self._arrays(), records.split([self.dim, self.width - self.dim], 1), strict=False):
            array[slots] = part

    def assemble(self, host: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> DeviceSlots:
        kernels: ModuleType = device_torch
        return DeviceSlots(self._gather(host, rows, slots), self.dim, kernels)

    def _inputs(self, batch: SlotBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and per-id factors; a mean is a sum with factors."""
        factors = batch.weights
        if self._pooled and batch.means.any():
            counts = np.diff(batch.offsets)
            of_bag = np.repeat(np.where(np.repeat(batch.means, batch.batch_size), counts, 1), counts).astype(np.float32)
            factors = (factors if factors.size else np.ones(len(of_bag), np.float32)) / of_bag
        return (
            self._indices(batch.slot_of_id),
            torch.from_numpy(batch.offsets).to(self.device),
            torch.from_numpy(factors).to(self.device) if factors.size else None,
        )

    def _columns(self, batch: SlotBatch) -> list[int]:
        return batch.columns.tolist()

    def lookup_pooled(self, batch: SlotBatch, output: Tensor) -> None:
        with torch.no_grad():
            pooled = self._table(*self._inputs(batch))
        for column, part in zip(self._columns(batch), pooled.split(self.dim, 1), strict=True):
            output[:, column : column + self.dim] = part

    def lookup_rows(self, batch: SlotBatch, output: Tensor) -> None:
        with torch.no_grad():
            output.copy_(self._table(*self._inputs(batch)))

    def update(self, batch: SlotBatch, gradient: Tensor, optimizer: int, parameters: np.ndarray) -> None:
        # The learning rate that counts is that of the backward pass; FBGEMM takes it in its forward pass, so there is
        # one here, too.
        self._table.set_learning_rate(float(parameters[layout.STEP_SIZE]))
        gradient = gradient.float()
        if self._pooled:
            parts = [gradient[:, column : column + self.dim] for column in self._columns(batch)]
            gradient = torch.cat(parts, dim=1)
        with torch.enable_grad():
            output = self._table(*self._inputs(batch))
        output.backward(gradient.contiguous())

    def weight_gradients(self, batch: SlotBatch, gradient: Tensor) -> Tensor:
        weights = DeviceSlots(self._arrays()[0], self.dim, device_torch)
        return weights.weight_gradients(batch, gradient)
