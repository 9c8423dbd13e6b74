"""Host tables train to the same bits as plain torch with every table resident."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings
from recsys_offload.embedding.kernels.layout import CHUNK
from tests.embedding.reference_tables import ReferenceBagCollection

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def random_batch(
    random: np.random.Generator,
    keys: dict[str, int],
    batch_size: int,
    longest: int,
    skew: float,
    weighted: bool,
) -> KeyedJaggedTensor:
    """Bags of 0 to ``longest`` ids per key, the smaller ids more frequent the larger ``skew`` is."""
    lengths = random.integers(0, longest + 1, len(keys) * batch_size)
    if longest == 1:
        lengths[:] = 1
    values = []
    for index, rows in enumerate(keys.values()):
        count = lengths[index * batch_size : (index + 1) * batch_size].sum()
        values.append((rows * random.random(count) ** (1 + skew)).astype(np.int64))
    flat = torch.from_numpy(np.concatenate(values))
    weights = torch.from_numpy(random.standard_normal(len(flat)).astype(np.float32)) if weighted else None
    return KeyedJaggedTensor(list(keys), flat, weights, lengths=torch.from_numpy(lengths))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    optimizer=st.sampled_from(OPTIMIZERS),
    dims=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    rows=st.integers(1, 300),
    batch_size=st.integers(1, 70),
    longest=st.integers(1, 5),
    skew=st.floats(0, 8),
    mean=st.booleans(),
    weighted=st.booleans(),
    shared=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.01]),
    threads=st.integers(1, 4),
)
def test_training_equals_resident_tables(
    seed: int,
    optimizer: str,
    dims: list[int],
    rows: int,
    batch_size: int,
    longest: int,
    skew: float,
    mean: bool,
    weighted: bool,
    shared: bool,
    weight_decay: float,
    threads: int,
) -> None:
    random = np.random.default_rng(seed)
    configs, keys = [], {}
    for index, dim in enumerate(dims):
        table_rows = rows + index
        names = [f"feature_{index}", f"twin_{index}"] if shared and index == 0 else [f"feature_{index}"]
        keys.update(dict.fromkeys(names, table_rows))
        pooling = PoolingType.MEAN if mean and index != 1 else PoolingType.SUM
        configs.append(EmbeddingBagConfig(table_rows, dim, f"table_{index}", feature_names=names, pooling=pooling))
    keys = dict(sorted(keys.items(), key=lambda _: random.random()))
    chosen = SparseOptimizerSettings(name=optimizer, learning_rate=0.1, weight_decay=weight_decay)
    host = HostEmbeddingBagCollection(configs, weighted, optimizer=chosen, seed=seed, threads=threads)
    resident = ReferenceBagCollection(host, chosen)
    for step in range(3):
        batch = random_batch(random, keys, batch_size, longest, skew, weighted)
        host.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        output = host(batch).values()
        assert torch.equal(output, resident.forward(batch))
        gradient = torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32))
        output.backward(gradient)
        resident.backward(batch, gradient, 0.1 / (step + 1))
    resident.assert_equal(host)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hot_rows_are_summed_in_the_same_order_by_any_number_of_threads(optimizer: str, threads: int) -> None:
    random = np.random.default_rng(7)
    chosen = SparseOptimizerSettings(name=optimizer, learning_rate=0.1)
    configs = [EmbeddingBagConfig(rows, 12, f"table_{rows}", feature_names=[f"feature_{rows}"]) for rows in (1, 2, 900)]
    host = HostEmbeddingBagCollection(configs, optimizer=chosen, threads=threads)
    resident = ReferenceBagCollection(host, chosen)
    keys = {f"feature_{rows}": rows for rows in (1, 2, 900)}
    batch_size = 3 * CHUNK + 17
    for _ in range(2):
        batch = random_batch(random, keys, batch_size, 1, 0.0, False)
        output = host(batch).values()
        gradient = torch.from_numpy(random.standard_normal(tuple(output.shape)).astype(np.float32))
        output.backward(gradient)
        resident.backward(batch, gradient, 0.1)
    resident.assert_equal(host)
