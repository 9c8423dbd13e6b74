"""Parquet files to batches."""

from recsys_offload.data.batch import Batch
from recsys_offload.data.batches import ParquetBatches
from recsys_offload.data.config import DataSettings
from recsys_offload.data.encoding import Encoding

__all__ = ["Batch", "DataSettings", "Encoding", "ParquetBatches"]
