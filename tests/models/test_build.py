"""TorchRec's models run unchanged over host tables."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.data import DataSettings
from recsys_offload.embedding import EmbeddingSettings, host_collections
from recsys_offload.models import ModelSettings, build_model, table_configs

CPU = torch.device("cpu")


def data(**sparse: Any) -> DataSettings:
    features = sparse or {
        "user": {"num_embeddings": 30},
        "tags": {"num_embeddings": 9, "pooling": "mean"},
        "friend": {"num_embeddings": 30, "table": "user"},
    }
    return DataSettings.model_validate({"train": "x.parquet", "dense": {"age": {}, "hour": {}}, "sparse": features})


def batch() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    ids = KeyedJaggedTensor(
        ["user", "tags", "friend"],
        torch.tensor([3, 29, 7, 8, 8, 1, 3, 4, 5]),
        lengths=torch.tensor([1, 1, 1, 0, 2, 1, 1, 1, 1]),
    )
    return torch.tensor([[0.5, 1.0], [2.0, 0.0], [-1.0, 3.0]]), ids


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn", "deepfm"])
def test_models_train_and_give_logits(name: str) -> None:
    settings = ModelSettings(name=name, embedding_dim=8, dense_layers=[16], over_layers=[16])
    embedding = EmbeddingSettings.model_validate({"optimizer": {"name": "adagrad", "learning_rate": 0.1}})
    model = build_model(settings, data(), embedding, seed=1, device=CPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    labels = torch.tensor([[1.0], [0.0], [1.0]])
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(*batch()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    logits = model(*batch())
    assert logits.shape == (3, 1)
    assert losses[-1] < 0.05 < losses[0]
    assert logits.max() > 2 and logits.min() < -2, "probabilities instead of logits would lie in [0, 1]"


def test_dlrm_equals_torchrecs_with_resident_tables() -> None:
    settings = ModelSettings(embedding_dim=8, dense_layers=[16], over_layers=[16, 8])
    embedding = EmbeddingSettings.model_validate({"optimizer": {"name": "sgd", "learning_rate": 0.1}})
    ours = build_model(settings, data(), embedding, seed=1, device=CPU)
    tables = EmbeddingBagCollection(tables=copy.deepcopy(table_configs(data(), 8)))
    theirs = DLRM(tables, 2, [16, 8], [16, 8, 1])
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(*batch()), theirs(*batch()))
    ours(*batch()).sum().backward()
    theirs(*batch()).sum().backward()
    for (name, one), (_, other) in zip(
        ours.named_parameters(),
        ((n, p) for n, p in theirs.named_parameters() if "embedding_bags" not in n),
        strict=True,
    ):
        assert torch.equal(one.grad, other.grad), name


def test_initial_values_depend_on_the_seed_and_not_on_the_callers_random_state() -> None:
    def state(seed: int) -> dict[str, torch.Tensor]:
        return build_model(ModelSettings(), data(), EmbeddingSettings(), seed, CPU).state_dict()

    torch.manual_seed(5)
    first = state(1)
    untouched = torch.rand(1)
    torch.manual_seed(6)
    assert all(torch.equal(value, first[key]) for key, value in state(1).items())
    assert any(not torch.equal(value, first[key]) for key, value in state(2).items())
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), untouched)


def test_a_model_moves_with_to() -> None:
    model = build_model(ModelSettings(), data(), EmbeddingSettings(), 0, CPU).to(torch.float32).to("cpu")
    assert len(host_collections(model)) == 1


@pytest.mark.parametrize(
    ("settings", "features", "message"),
    [
        (ModelSettings(name="deepfm", dense_layers=[4, 4]), {}, "deepfm takes exactly one hidden layer"),
        (
            ModelSettings(),
            {"a": {"num_embeddings": 3}, "b": {"num_embeddings": 4, "table": "a"}},
            r"'a' and 'b' share table 'a', but differ in num_embeddings \(3, 4\)",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(settings: ModelSettings, features: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(settings, data(**features), EmbeddingSettings(), 0, CPU)


def test_a_model_needs_a_sparse_feature() -> None:
    no_features = DataSettings.model_validate({"train": "x.parquet"})
    with pytest.raises(ValueError, match=r"data\.sparse names no feature"):
        build_model(ModelSettings(), no_features, EmbeddingSettings(), 0, CPU)


def test_a_memory_limit_is_kept() -> None:
    data_settings = data(user={"num_embeddings": 1_000_000})
    fits = EmbeddingSettings.model_validate({"memory_limit": "80MiB"})
    build_model(ModelSettings(embedding_dim=16), data_settings, fits, 0, CPU)
    too_small = EmbeddingSettings.model_validate({"memory_limit": "32MiB"})
    with pytest.raises(
        MemoryError, match=r"rowwise_adagrad state take 0\.06 GiB, more than the memory_limit of 0\.03 GiB"
    ):
        build_model(ModelSettings(embedding_dim=16), data_settings, too_small, 0, CPU)
