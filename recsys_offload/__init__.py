"""Train recommenders whose embedding tables do not fit in accelerator memory."""

import os

# Read by OpenMP's runtime when torch loads it: idle threads of the dense part then sleep, instead of spinning on the
# cores that the tables' threads need. Measured on 2 cores (DLRM, 26 tables x 100k x 64, batch 2048): planning, lookup
# and update took 11.9 ms instead of 20.3 ms, the dense part the same. It has no effect where torch is imported first.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from recsys_offload.data import Batch, DataSettings, Encoding, ParquetBatches
from recsys_offload.embedding import (
    CacheSettings,
    EmbeddingSettings,
    HostEmbeddingBagCollection,
    HostEmbeddingCollection,
    InvalidIdError,
    Prefetcher,
    SparseOptimizerSettings,
    host_collections,
    prefetch,
)
from recsys_offload.models import ModelSettings, build_model

__all__ = [
    "Batch",
    "CacheSettings",
    "DataSettings",
    "EmbeddingSettings",
    "Encoding",
    "HostEmbeddingBagCollection",
    "HostEmbeddingCollection",
    "InvalidIdError",
    "ModelSettings",
    "ParquetBatches",
    "Prefetcher",
    "SparseOptimizerSettings",
    "build_model",
    "host_collections",
    "prefetch",
]
