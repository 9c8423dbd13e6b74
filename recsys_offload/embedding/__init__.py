"""Embedding tables in host memory."""

from recsys_offload.embedding.collection import HostCollection
from recsys_offload.embedding.config import CacheSettings, EmbeddingSettings, SparseOptimizerSettings
from recsys_offload.embedding.modules import HostEmbeddingBagCollection, HostEmbeddingCollection, host_collections
from recsys_offload.embedding.plan import InvalidIdError
from recsys_offload.embedding.prefetch import Prefetcher, prefetch

__all__ = [
    "CacheSettings",
    "EmbeddingSettings",
    "HostCollection",
    "HostEmbeddingBagCollection",
    "HostEmbeddingCollection",
    "InvalidIdError",
    "Prefetcher",
    "SparseOptimizerSettings",
    "host_collections",
    "prefetch",
]
