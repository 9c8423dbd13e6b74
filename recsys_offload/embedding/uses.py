"""How often each row is used, counted before training: what a warm start and the choice of placements go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def count_uses(
    batches: Iterable[KeyedJaggedTensor], configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig]
) -> dict[str, np.ndarray]:
    """Counts, for each table, in how many of the batches each row occurs.

    Args:
        batches: to count.
        configs: of all tables. Ids that a table has no row for are left out.

    Returns:
        Table -> float32 ``[rows]``: the share of the batches that use each row; zeros where there are no batches.
    """
    uses = {config.name: np.zeros(config.num_embeddings, np.float32) for config in configs}
    count = 0
    for batch in batches:
        count += 1
        for config in configs:
            ids = [batch[feature].values().cpu().numpy() for feature in config.feature_names]
            rows = np.unique(np.concatenate(ids))
            rows = rows[np.searchsorted(rows, 0) : np.searchsorted(rows, config.num_embeddings)]
            uses[config.name][rows] += 1
    for table in uses.values():
        table /= max(1, count)
    return uses
