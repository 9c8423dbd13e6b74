"""FBGEMM's embeddings with its own cache: the rows in host memory that the device reaches, the hot ones beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.click_batches import table_configs
from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.options import Options
from benchmarks.gpu.tower import LEARNING_RATE, DenseTraining
from recsys_offload import Batch

OPTIMIZERS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}


def why_not(options: Options, device: torch.device) -> str | None:
    """Why it cannot be measured here; None where it can."""
    try:
        import fbgemm_gpu
    except (ImportError, OSError) as error:
        return f"not installed ({type(error).__name__})"
    variant = getattr(fbgemm_gpu, "__variant__", "unknown")
    if variant == "cpu":
        return "not installed (fbgemm_gpu is there as its CPU build only, which has no such cache)"
    if device.type == "cpu":
        return "needs a GPU"
    if options.optimizer not in OPTIMIZERS:
        return f"FBGEMM has no {options.optimizer} like ours"
    return None


class ManagedCaching(Contender):
    """FBGEMM's table-batched embedding with ``MANAGED_CACHING``, LRU, and its prefetch pipeline, under a DLRM.

    On a CPU, where FBGEMM has no cache, its rows are looked up on the host: for tests of what is around it.
    """

    def __init__(self, options: Options, device: torch.device, share: float) -> None:
        """Args:
        options: the tables' sizes and their optimizer.
        device: of the model.
        share: per cent of the rows that the cache holds.
        """
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation, PoolingMode

        self._device, self._on_gpu = device, device.type != "cpu"
        place = (
            (EmbeddingLocation.MANAGED_CACHING, training.ComputeDevice.CUDA)
            if self._on_gpu
            else (EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        )
        configs = table_configs(options)
        self._embeddings = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(config.num_embeddings, config.embedding_dim, *place) for config in configs],
            optimizer=EmbOptimType[OPTIMIZERS[options.optimizer]],
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
            cache_algorithm=CacheAlgorithm.LRU,
            cache_load_factor=share / 100,
            prefetch_pipeline=self._on_gpu,
            # Mapped host memory, as ours: with managed memory, which is the default, a program can hang the GPU.
            uvm_host_mapped=self._on_gpu,
            stochastic_rounding=False,
            device=device,
        )
        bound = options.rows**-0.5
        self._embeddings.init_embedding_weights_uniform(-bound, bound)
        self._dense = DenseTraining(options.dim, device)
        self._prefetching = torch.Stream(device) if self._on_gpu else None
        self._share = share

    def steps(self, batches: Iterable[Batch], depth: int) -> Iterator[None]:
        """As FBGEMM's pipeline in TorchRec does: the next batch's rows are fetched between forward and backward."""
        source = iter(batches)
        batch = next(source, None)
        ids = self._prefetch(batch) if batch is not None else None
        while batch is not None and ids is not None:
            if self._prefetching is not None:
                torch.accelerator.current_stream().wait_stream(self._prefetching)
            moved = batch.to(self._device, non_blocking=True)
            loss = self._dense.forward(moved, self._embeddings(*ids))
            batch = next(source, None)
            ids = self._prefetch(batch) if batch is not None else None
            self._dense.backward(loss)
            yield

    def _prefetch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch's ids and offsets on the device, and on a GPU their rows on the way to the cache."""
        values, offsets = batch.sparse.values(), batch.sparse.offsets()
        if self._prefetching is None:
            return values, offsets
        computing = torch.cuda.current_stream()
        with self._prefetching:
            ids = (values.to(self._device), offsets.to(self._device))
            self._embeddings.prefetch(*ids, forward_stream=computing)
            for tensor in ids:
                tensor.record_stream(computing)
        return ids

    def describe(self) -> dict[str, Any]:
        return {"placement": "FBGEMM managed caching", "share_percent": self._share}

    def close(self) -> None:
        """Leaves the memory to the garbage collector."""
