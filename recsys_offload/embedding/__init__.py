"""Embedding tables in host memory."""

from recsys_offload.embedding.config import EmbeddingSettings, SparseOptimizerSettings
from recsys_offload.embedding.modules import HostEmbeddingBagCollection, HostEmbeddingCollection, host_collections
from recsys_offload.embedding.plan import InvalidIdError

__all__ = [
    "EmbeddingSettings",
    "HostEmbeddingBagCollection",
    "HostEmbeddingCollection",
    "InvalidIdError",
    "SparseOptimizerSettings",
    "host_collections",
]
