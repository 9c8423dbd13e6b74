"""Models: TorchRec's own, over tables in host memory."""

from recsys_offload.models.build import build_model, table_configs
from recsys_offload.models.config import ModelSettings

__all__ = ["ModelSettings", "build_model", "table_configs"]
