"""The message for a loss that is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.data.batch import Batch
from recsys_offload.embedding.config import SparseOptimizerSettings
from recsys_offload.embedding.modules import HostEmbeddingBagCollection
from recsys_offload.faults import describe_fault, naming_batch


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=[name])
            for name in ("user", "item")
        ]
        self.collection = HostEmbeddingBagCollection(tables, optimizer=SparseOptimizerSettings())
        self.linear = nn.Linear(2, 1)


def _batch(dense: torch.Tensor) -> Batch:
    sparse = KeyedJaggedTensor(
        keys=["user", "item"], values=torch.tensor([0, 1, 2, 3, 4, 5]), lengths=torch.ones(6, dtype=torch.int32)
    )
    return Batch(dense=dense, sparse=sparse, labels=torch.zeros(3), origin="part-0.parquet, row group 2, row 7")


def test_it_names_step_batch_and_dense_columns() -> None:
    dense = torch.tensor([[1.0, 2.0], [math.nan, 1e20], [math.inf, 1.0]])
    text = describe_fault(_Model(), _batch(dense), ["age", "price"], 12, math.nan)
    assert "the loss is nan at step 12" in text
    assert "part-0.parquet, row group 2, row 7" in text
    assert "dense column 'age': 2 of 3 values are not finite, the first in example 1" in text
    assert "dense column 'price': values up to 1e+20, in example 1" in text
    assert "embedding of" not in text and "parameter" not in text


def test_it_names_embeddings_and_parameters() -> None:
    model = _Model()
    model.collection.tables.weight("item")[4] = math.inf
    with torch.no_grad():
        model.linear.weight[0, 1] = math.nan
    text = describe_fault(model, _batch(torch.zeros(3, 2)), ["age", "price"], 3, math.inf)
    assert "embedding of 'item'" in text and "in 1 of 3 examples, the first in example 1" in text
    assert "embedding of 'user'" not in text and "dense column" not in text
    assert "parameter 'linear.weight': 1 of 2 values" in text


def test_it_says_when_nothing_is_at_fault_by_itself() -> None:
    text = describe_fault(_Model(), _batch(torch.zeros(3, 2)), ["age", "price"], 3, math.inf)
    assert "the activations overflowed" in text


def test_a_value_error_gets_the_origin_of_the_batch() -> None:
    with pytest.raises(ValueError, match="wrong id") as raised, naming_batch(_batch(torch.zeros(3, 2))):
        raise ValueError("wrong id")
    assert raised.value.__notes__ == [
        "This was in the batch of 3 examples that starts at part-0.parquet, row group 2, row 7."
    ]
