"""The plan lists each row once, and says where each occurs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import SparseOptimizerSettings
from recsys_offload.embedding.plan import GroupFeatures, Ids, InvalidIdError, Plan, feature_ids, make_plan
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads


def plan_batch(
    tables: HostTables, configs: list[EmbeddingBagConfig], batch: KeyedJaggedTensor, threads: KernelThreads
) -> tuple[Plan, GroupFeatures, Ids]:
    group = tables.groups[0]
    columns = {config.name: index * group.dim for index, config in enumerate(configs)}
    features = GroupFeatures.describe(group, configs, columns, batch.keys())
    ids = Ids.of(batch, weighted=False)
    return make_plan(group, features, ids, True, "error", 0, threads), features, ids


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    table_rows=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    batch_size=st.integers(0, 40),
    longest=st.integers(0, 4),
    threads=st.integers(1, 4),
)
def test_every_id_is_planned_once_in_batch_order(
    seed: int, table_rows: list[int], batch_size: int, longest: int, threads: int
) -> None:
    random = np.random.default_rng(seed)
    kernel_threads = KernelThreads(threads)
    configs = [
        EmbeddingBagConfig(rows, 2, f"t{index}", feature_names=[f"f{index}"]) for index, rows in enumerate(table_rows)
    ]
    tables = HostTables(configs, SparseOptimizerSettings(name="sgd"), 0, kernel_threads, pin=False)
    bases = np.concatenate([[0], np.cumsum(table_rows)])
    for _ in range(3):
        lengths = random.integers(0, longest + 1, (len(configs), batch_size))
        values = [random.integers(0, rows, lengths[index].sum()) for index, rows in enumerate(table_rows)]
        batch = KeyedJaggedTensor(
            [f"f{index}" for index in range(len(configs))],
            torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
            stride=batch_size,
        )
        plan, _, _ = plan_batch(tables, configs, batch, kernel_threads)
        rows = np.concatenate([ids + bases[index] for index, ids in enumerate(values)])
        assert len(np.unique(plan.rows)) == len(plan.rows)
        assert np.array_equal(plan.rows[plan.inverse], rows)
        assert np.array_equal(np.sort(plan.order), np.arange(len(rows)))
        assert plan.starts[0] == 0 and plan.starts[-1] == len(rows)
        for number, row in enumerate(plan.rows):
            occurrences = plan.order[plan.starts[number] : plan.starts[number + 1]]
            assert np.array_equal(occurrences, np.flatnonzero(rows == row))
        samples = np.concatenate([np.repeat(np.arange(batch_size), lengths[index]) for index in range(len(configs))])
        columns = np.concatenate([np.full(len(ids), index * 2) for index, ids in enumerate(values)])
        assert np.array_equal(plan.gradient_rows, samples[plan.order])
        assert np.array_equal(plan.gradient_columns, columns[plan.order])


def test_a_table_read_by_two_features_lists_a_shared_row_once() -> None:
    configs = [EmbeddingBagConfig(10, 2, "t", feature_names=["a", "b"])]
    threads = KernelThreads(1)
    tables = HostTables(configs, SparseOptimizerSettings(name="sgd"), 0, threads, pin=False)
    batch = KeyedJaggedTensor(["b", "a"], torch.tensor([7, 3, 3, 5]), lengths=torch.tensor([1, 1, 1, 1]))
    plan, features, ids = plan_batch(tables, configs, batch, threads)
    assert plan.rows.tolist() == [3, 5, 7]
    assert plan.inverse.tolist() == [0, 1, 2, 0]
    assert feature_ids(features, ids).tolist() == [0, 2, 4]


@pytest.mark.parametrize("wrong", [-1, 10, 2**40, -(2**63)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_wrong_id_is_named_with_table_feature_sample_and_value(wrong: int, threads: int) -> None:
    configs = [EmbeddingBagConfig(10, 2, f"t{index}", feature_names=[f"f{index}"]) for index in range(3)]
    kernel_threads = KernelThreads(threads)
    tables = HostTables(configs, SparseOptimizerSettings(name="sgd"), 0, kernel_threads, pin=False)
    batch = KeyedJaggedTensor(
        ["f2", "f1", "f0"],
        torch.tensor([1, 2, 3, 4, wrong, 5, 6]),
        lengths=torch.tensor([1, 0, 1, 0, 1, 2, 1, 0, 1]),
    )
    with pytest.raises(InvalidIdError, match=rf"table 't1', feature 'f1', sample 2: id {wrong} is outside \[0, 10\)"):
        plan_batch(tables, configs, batch, kernel_threads)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 1, 3], "malformed"),
        ([0, 1, 2, 9], "malformed"),
        ([1, 1, 2, 3], "malformed"),
        ([-1, 1, 2, 3], "malformed"),
    ],
)
def test_malformed_offsets_are_refused_before_anything_is_read(offsets: list[int], message: str) -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), offsets=torch.tensor(offsets), stride=3)
    with pytest.raises(ValueError, match=message):
        Ids.of(batch, weighted=False)


def test_ids_must_be_integers_and_weights_must_be_there() -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor([1.0, 2.0]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"ids must be integers, not torch\.float32"):
        Ids.of(batch, weighted=False)
    with pytest.raises(ValueError, match="has no weights"):
        Ids.of(KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])), weighted=True)
