"""TorchRec's models over tables in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from recsys_offload.data import DataSettings
from recsys_offload.embedding import EmbeddingSettings, HostEmbeddingBagCollection
from recsys_offload.embedding.placement import choose_placements, fit_cache
from recsys_offload.models.config import ModelSettings
from recsys_offload.models.sparse_arch import DirectSparseArch


def table_configs(data: DataSettings, embedding_dim: int) -> list[EmbeddingBagConfig]:
    """One table per distinct ``table`` name among the sparse features.

    Raises:
        ValueError: features share a table, but differ in its rows or in their pooling.
    """
    tables: dict[str, EmbeddingBagConfig] = {}
    for name, feature in data.sparse.items():
        table_name = feature.table or name
        pooling = PoolingType[feature.pooling.upper()]
        table = tables.get(table_name)
        if table is None:
            tables[table_name] = EmbeddingBagConfig(
                name=table_name,
                num_embeddings=feature.num_embeddings,
                embedding_dim=embedding_dim,
                feature_names=[name],
                pooling=pooling,
            )
            continue
        if (table.num_embeddings, table.pooling) != (feature.num_embeddings, pooling):
            raise ValueError(
                f"sparse features {table.feature_names[0]!r} and {name!r} share table {table_name!r}, but differ in "
                f"num_embeddings ({table.num_embeddings}, {feature.num_embeddings}) or pooling "
                f"({table.pooling.name.lower()}, {feature.pooling}); make them the same"
            )
        table.feature_names.append(name)
    return list(tables.values())


def build_model(
    settings: ModelSettings,
    data: DataSettings,
    embedding: EmbeddingSettings,
    seed: int,
    device: torch.device,
    uses: Mapping[str, np.ndarray] | None = None,
) -> nn.Module:
    """The model that the settings describe.

    Called with dense features float32 ``[B, F]`` on ``device`` and a ``KeyedJaggedTensor`` on the host, it returns
    logits ``[B, 1]`` on ``device``.

    Args:
        settings: of the model.
        data: whose sparse features become the tables.
        embedding: how the tables are trained.
        seed: of all initial values.
        device: of the dense part.
        uses: how often the rows are used, where that is known (``count_uses``): it helps to choose placements.

    Raises:
        ValueError: the model cannot be built from these settings.
    """
    if not data.sparse:
        raise ValueError("data.sparse names no feature: the models need at least one embedding table")
    tables = table_configs(data, settings.embedding_dim)
    placements = choose_placements(tables, embedding, device, uses)
    collection = HostEmbeddingBagCollection(
        tables,
        is_weighted=any(feature.weights is not None for feature in data.sparse.values()),
        optimizer=embedding.optimizer,
        invalid_ids=embedding.invalid_ids,
        fallback_row=embedding.fallback_row,
        seed=seed,
        threads=embedding.threads,
        memory_limit=embedding.memory_limit,
        device=device,
        placements=placements,
        cache=fit_cache(tables, embedding, placements, device),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _dense_part(settings, collection, len(data.dense)).to(device)


def _dense_part(settings: ModelSettings, collection: HostEmbeddingBagCollection, dense_features: int) -> nn.Module:
    dense_layers = [*settings.dense_layers, settings.embedding_dim]
    over_layers = [*settings.over_layers, 1]
    if settings.name in ("dlrm", "dlrm_dcn"):
        if settings.name == "dlrm":
            dlrm = DLRM(collection, dense_features, dense_layers, over_layers)
        else:
            dlrm = DLRM_DCN(
                collection, dense_features, dense_layers, over_layers, settings.cross_layers, settings.cross_rank
            )
        dlrm.sparse_arch = DirectSparseArch(collection)
        return dlrm
    if len(settings.dense_layers) != 1:
        raise ValueError(f"model.dense_layers: deepfm takes exactly one hidden layer, not {settings.dense_layers}")
    model = SimpleDeepFMNN(dense_features, collection, settings.dense_layers[0], settings.deep_fm_dim)
    # TorchRec's DeepFM ends in a sigmoid. The loss takes logits, which are exact where probabilities round to 0 or 1.
    model.over_arch.model[1] = nn.Identity()
    return model
