"""How often rows are used, counted before training."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding.uses import count_uses

ROWS = {"users": 6, "things": 4}
CONFIGS = [
    EmbeddingBagConfig(ROWS["users"], 2, "users", feature_names=["user", "friend"]),
    EmbeddingBagConfig(ROWS["things"], 2, "things", feature_names=["item"]),
]


def batch(user: list[int], friend: list[int], item: list[int], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """A batch of one sample."""
    lengths = torch.tensor([len(item), len(user), len(friend), 1])
    values = torch.tensor([*item, *user, *friend, 3], dtype=dtype)
    return KeyedJaggedTensor(["item", "user", "friend", "other"], values, lengths=lengths)


def test_uses_are_the_share_of_the_batches_that_a_row_occurs_in() -> None:
    batches = [batch([1, 1, 5], [], [0]), batch([1], [4], [3, 3]), batch([], [], [3]), batch([0, 1], [2], [])]
    uses = count_uses(batches, CONFIGS)
    assert list(uses) == ["users", "things"]
    assert uses["users"].tolist() == [0.25, 0.75, 0.25, 0.0, 0.25, 0.25]
    assert uses["things"].tolist() == [0.25, 0.0, 0.0, 0.5]
    assert uses["users"].dtype == uses["things"].dtype == np.float32


def test_a_row_that_two_features_use_in_one_batch_is_used_in_one_batch() -> None:
    uses = count_uses([batch([1, 2], [2, 3], []), batch([2], [2], [])], CONFIGS)
    assert uses["users"].tolist() == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]


def test_ids_that_have_no_row_are_left_out() -> None:
    uses = count_uses([batch([-1, 6, 5, 2**40], [-(2**63)], [4, -5, 2**63 - 1])], CONFIGS)
    assert uses["users"].tolist() == [0, 0, 0, 0, 0, 1]
    assert uses["things"].tolist() == [0, 0, 0, 0]


def test_without_batches_or_ids_nothing_is_used() -> None:
    nothing = {name: [0.0] * rows for name, rows in ROWS.items()}
    for batches in ([], [batch([], [], [])]):
        assert {name: table.tolist() for name, table in count_uses(batches, CONFIGS).items()} == nothing


def test_batches_may_come_from_a_generator_and_tables_from_either_kind_of_description() -> None:
    tables = [EmbeddingConfig(num_embeddings=4, embedding_dim=2, name="things", feature_names=["item"])]
    source = (batch([], [], [row], torch.int32) for row in (0, 2, 2, 2))
    assert count_uses(source, tables)["things"].tolist() == [0.25, 0.0, 0.75, 0.0]
    assert list(source) == []


@given(st.lists(st.lists(st.integers(-3, 7), max_size=6), max_size=8))
def test_uses_are_what_counting_row_by_row_gives(ids: list[list[int]]) -> None:
    uses = count_uses([batch([], [], items) for items in ids], CONFIGS)["things"]
    expected = [sum(row in items for items in ids) / max(1, len(ids)) for row in range(ROWS["things"])]
    assert np.allclose(uses, expected, rtol=1e-6)
