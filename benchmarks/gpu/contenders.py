"""What takes turns in training: our collections with all rows on the device, or with a cache there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.click_batches import table_configs
from benchmarks.gpu.options import Options
from benchmarks.gpu.tower import LEARNING_RATE, DenseTraining
from recsys_offload import Batch, HostEmbeddingBagCollection, SparseOptimizerSettings, prefetch
from recsys_offload.embedding.config import CacheSettings, Placement, TransferName
from recsys_offload.embedding.statistics import CacheCounts


class Contender(ABC):
    """A model in training."""

    @abstractmethod
    def steps(self, batches: Iterable[Batch], depth: int) -> Iterator[None]:
        """Trains on every batch, one each time that it is asked for the next, looking ``depth`` batches ahead."""

    def counts(self) -> CacheCounts:
        """What its cache did so far, as far as that is known."""
        return CacheCounts()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What it is, for the report."""

    @abstractmethod
    def close(self) -> None:
        """Gives its threads and its memory back."""


class Ours(Contender):
    """Our collection under a DLRM."""

    def __init__(
        self,
        options: Options,
        device: torch.device,
        share: float | None,
        transfer: TransferName,
        uses: Mapping[str, np.ndarray],
    ) -> None:
        """Args:
            options: the tables' sizes, their optimizer and the kernels.
            device: of the model.
            share: per cent of the rows that the cache holds; None for all rows on the device.
            transfer: of the rows.
            uses: by which the cache is warmed.

        Raises:
            MemoryError: the tables do not fit.
        """
        configs = table_configs(options)
        placement: Placement = "device" if share is None else "cached"
        size = "100%" if share is None else f"{share}%"
        self._collection = HostEmbeddingBagCollection(
            configs,
            optimizer=SparseOptimizerSettings(name=options.optimizer, learning_rate=LEARNING_RATE),
            device=device,
            placements={config.name: placement for config in configs},
            cache=CacheSettings(size=size, kernels=options.kernels, transfer=transfer),
        )
        if share is not None:
            self._collection.warm(uses)
        self._dense = DenseTraining(options.dim, device)
        self._device = device
        self._about = {"placement": placement, "share_percent": share, "kernels": options.kernels, "transfer": transfer}

    def steps(self, batches: Iterable[Batch], depth: int) -> Iterator[None]:
        for batch in prefetch(batches, self._collection, depth):
            pooled = self._collection(batch.sparse).values()
            self._dense.backward(self._dense.forward(batch.to(self._device, non_blocking=True), pooled))
            yield

    def counts(self) -> CacheCounts:
        return self._collection.statistics.counts()

    def describe(self) -> dict[str, Any]:
        assert self._collection.cache is not None
        return {
            **self._about,
            "slots": self._collection.cache.slot_count,
            "table_bytes": self._collection.tables.nbytes,
        }

    def close(self) -> None:
        assert self._collection.cache is not None
        self._collection.cache.close()
