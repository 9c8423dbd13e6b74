"""Which model, and how large."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from recsys_offload.settings import Settings

Width = Annotated[int, Field(ge=1)]


class ModelSettings(Settings):
    """The model: one of TorchRec's, over tables in host memory."""

    name: Literal["dlrm", "dlrm_dcn", "deepfm"] = Field(
        "dlrm",
        description="dlrm (dot-product interactions), dlrm_dcn (low-rank cross network, as MLPerf's DCNv2) or deepfm.",
    )
    embedding_dim: Width = Field(16, description="Width of every embedding table.")
    dense_layers: list[Width] = Field(
        [64],
        description="Hidden layers of the net over the dense features; a last one of embedding_dim follows. "
        "deepfm takes exactly one.",
    )
    over_layers: list[Width] = Field(
        [64, 32],
        description="Hidden layers of the net over the interactions; a last one of width 1 follows. deepfm has none.",
    )
    cross_layers: Width = Field(3, description="Layers of the cross network (dlrm_dcn).")
    cross_rank: Width = Field(64, description="Rank of each cross layer (dlrm_dcn).")
    deep_fm_dim: Width = Field(16, description="Output width of the deep part of the interaction (deepfm).")
