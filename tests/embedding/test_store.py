"""Tables in host memory: layout, initial values, size."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads


def make_tables(
    configs: list[EmbeddingBagConfig], optimizer: str = "sgd", seed: int = 0, threads: int = 2
) -> HostTables:
    return HostTables(configs, SparseOptimizerSettings(name=optimizer), seed, KernelThreads(threads), pin=False)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    def weight(names: list[str], seed: int, threads: int) -> torch.Tensor:
        return make_tables([EmbeddingBagConfig(1001, 7, name) for name in names], seed=seed, threads=threads).weight(
            "a"
        )

    expected = weight(["a"], 3, 1)
    assert torch.equal(weight(["b", "a"], 3, 5), expected)
    assert not torch.equal(weight(["a"], 4, 1), expected)
    two = make_tables([EmbeddingBagConfig(1001, 7, "a"), EmbeddingBagConfig(1001, 7, "b")])
    assert not torch.equal(two.weight("a"), two.weight("b"))


def test_initial_values_are_uniform_as_torchrec_draws_them() -> None:
    rows = 40_000
    weight = make_tables([EmbeddingBagConfig(rows, 16, "a")]).weight("a")
    bound = rows**-0.5
    assert weight.min() >= -bound and weight.max() <= bound
    counts = torch.histc(weight, 20, -bound, bound)
    expected = weight.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square, 19 degrees of freedom: p < 0.001 above 43.8
    assert abs(torch.corrcoef(torch.stack([weight[:, 0], weight[:, 1]]))[0, 1]) < 0.02


def test_given_bounds_and_functions_are_used() -> None:
    configs = [
        EmbeddingBagConfig(500, 4, "bounded", weight_init_min=2.0, weight_init_max=3.0),
        EmbeddingBagConfig(500, 4, "constant", init_fn=lambda weight: torch.nn.init.constant_(weight, 0.5)),
    ]
    tables = make_tables(configs, "adagrad")
    assert tables.weight("bounded").min() >= 2 and tables.weight("bounded").max() <= 3
    assert torch.equal(tables.weight("constant"), torch.full((500, 4), 0.5))
    assert torch.count_nonzero(tables.optimizer_state("constant")["sum"]) == 0


@pytest.mark.parametrize(
    ("optimizer", "shapes"),
    [
        ("sgd", {}),
        ("adagrad", {"sum": (9, 1)}),
        ("rowwise_adagrad", {"sum": (9,)}),
        ("adam", {"exp_avg": (9, 1), "exp_avg_sq": (9, 1)}),
    ],
)
def test_state_lies_beside_the_weights(optimizer: str, shapes: dict[str, tuple[int, ...]]) -> None:
    tables = make_tables([EmbeddingBagConfig(9, 1, "a")], optimizer)
    state = tables.optimizer_state("a")
    assert {name: tuple(value.shape) for name, value in state.items()} == shapes
    assert tables.nbytes == 4 * 9 * (1 + len(shapes))
    for value in state.values():
        value.fill_(3.0)
    assert tables.weight("a").abs().max() < 1
    assert all(torch.equal(value, torch.full_like(value, 3.0)) for value in tables.optimizer_state("a").values())


def test_first_accumulator_value() -> None:
    settings = SparseOptimizerSettings(name="rowwise_adagrad", initial_accumulator=0.25)
    tables = HostTables([EmbeddingBagConfig(9, 3, "a")], settings, 0, KernelThreads(1), pin=False)
    assert torch.equal(tables.optimizer_state("a")["sum"], torch.full((9,), 0.25))


def test_tables_of_more_than_two_to_the_31_elements() -> None:
    rows, dim = 2**25 + 3, 70
    leave_untouched = lambda weight: None  # noqa: E731 - the pages that no batch touches are never mapped
    config = EmbeddingBagConfig(rows, dim, "huge", feature_names=["f"], init_fn=leave_untouched)
    collection = HostEmbeddingBagCollection([config], optimizer=SparseOptimizerSettings(name="sgd", learning_rate=1.0))
    assert rows * dim > 2**31
    ids = torch.tensor([rows - 1, 0, rows - 1])
    output = collection(KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([1, 1, 1]))).values()
    output.backward(torch.arange(3.0)[:, None].expand(3, dim))
    weight = collection.tables.weight("huge")
    assert torch.equal(weight[rows - 1], torch.full((dim,), -2.0))
    assert torch.equal(weight[rows - 2], torch.zeros(dim))


def test_descriptions_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(ValueError, match="table 'a' is described twice"):
        make_tables([EmbeddingBagConfig(9, 3, "a"), EmbeddingBagConfig(9, 3, "a")])
    with pytest.raises(ValueError, match="table 'a': num_embeddings and embedding_dim must be at least 1, not 9 and 0"):
        make_tables([EmbeddingBagConfig(9, 0, "a", weight_init_min=0, weight_init_max=0)])
    with pytest.raises(ValueError, match="table 'a': data_type must be FP32"):
        make_tables([EmbeddingBagConfig(9, 3, "a", data_type=DataType.FP16)])
    with pytest.raises(MemoryError, match=r"the group of 1 tables of dim 64 \(a\) needs .* GiB of host memory"):
        make_tables([EmbeddingBagConfig(2**40, 64, "a")])
