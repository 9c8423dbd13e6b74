"""The collections behave as TorchRec's do."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import (
    HostEmbeddingBagCollection,
    HostEmbeddingCollection,
    InvalidIdError,
    SparseOptimizerSettings,
    host_collections,
)

SGD = SparseOptimizerSettings(name="sgd", learning_rate=0.5)
CONFIGS = [
    EmbeddingBagConfig(11, 4, "users", feature_names=["user", "friend"]),
    EmbeddingBagConfig(7, 8, "products", feature_names=["item"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(5, 4, "tags", feature_names=["tag", "user"]),
]


def batch(weights: torch.Tensor | None = None, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Three samples; an empty bag, repeated ids, and a key that no table reads."""
    return KeyedJaggedTensor(
        ["item", "user", "unused", "tag", "friend"],
        torch.tensor([6, 6, 0, 1, 2, 4, 99, 98, 97, 3, 3, 0, 10, 10, 10], dtype=dtype),
        weights,
        lengths=torch.tensor([2, 1, 0, 1, 1, 1, 1, 1, 1, 0, 3, 0, 2, 0, 1], dtype=dtype),
    )


def bag_pair(is_weighted: bool = False) -> tuple[HostEmbeddingBagCollection, EmbeddingBagCollection]:
    host = HostEmbeddingBagCollection(copy.deepcopy(CONFIGS), is_weighted, optimizer=SGD, threads=2)
    plain = EmbeddingBagCollection(tables=copy.deepcopy(CONFIGS), is_weighted=is_weighted)
    plain.load_state_dict(host.state_dict())
    return host, plain


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bag_collection_gives_what_torchrec_gives(dtype: torch.dtype) -> None:
    host, plain = bag_pair()
    ours, theirs = host(batch(dtype=dtype)), plain(batch(dtype=dtype))
    assert ours.keys() == theirs.keys()
    assert ours.length_per_key() == theirs.length_per_key()
    assert torch.equal(ours.values(), theirs.values())
    assert host.embedding_bag_configs()[0].name == "users" and not host.is_weighted()


def test_sgd_equals_torch_on_torchrecs_collection() -> None:
    host, plain = bag_pair()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        gradient = torch.randn_like(host(batch()).values())
        host(batch()).values().backward(gradient)
        optimizer.zero_grad()
        plain(batch()).values().backward(gradient)
        optimizer.step()
    for key, weight in plain.state_dict().items():
        torch.testing.assert_close(host.state_dict()[key], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_sparse_optimizers_follow_torchs_own(name: str) -> None:
    config = EmbeddingBagConfig(20, 6, "t", feature_names=["f"])
    settings = SparseOptimizerSettings(name=name, learning_rate=0.1, eps=1e-8)
    host = HostEmbeddingBagCollection([config], optimizer=settings)
    plain = torch.nn.EmbeddingBag(20, 6, mode="sum", sparse=True, include_last_offset=True)
    with torch.no_grad():
        plain.weight.copy_(host.tables.weight("t"))
    optimizer = (
        torch.optim.Adagrad(plain.parameters(), lr=0.1, eps=1e-8)
        if name == "adagrad"
        else torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        values = torch.randint(0, 20, (12,), generator=generator)
        offsets = torch.tensor([0, 3, 3, 8, 12])
        gradient = torch.randn(4, 6, generator=generator)
        host(KeyedJaggedTensor(["f"], values, offsets=offsets)).values().backward(gradient)
        optimizer.zero_grad()
        plain(values, offsets).backward(gradient)
        optimizer.step()
    torch.testing.assert_close(host.tables.weight("t"), plain.weight.detach(), rtol=1e-5, atol=1e-6)


def test_rowwise_adagrad_follows_fbgemm() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    settings = SparseOptimizerSettings(name="rowwise_adagrad", learning_rate=0.1, eps=1e-8)
    host = HostEmbeddingBagCollection([EmbeddingBagConfig(20, 8, "t", feature_names=["f"])], optimizer=settings)
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(20, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
    )
    peer.split_embedding_weights()[0].copy_(host.tables.weight("t"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        values = torch.randint(0, 20, (12,), generator=generator)
        offsets = torch.tensor([0, 3, 3, 8, 12])
        gradient = torch.randn(4, 8, generator=generator)
        host(KeyedJaggedTensor(["f"], values, offsets=offsets)).values().backward(gradient)
        peer(values, offsets).backward(gradient)
    torch.testing.assert_close(host.tables.weight("t"), peer.split_embedding_weights()[0], rtol=1e-5, atol=1e-6)


def test_weighted_bags_and_the_gradient_of_their_weights() -> None:
    configs = [config for config in copy.deepcopy(CONFIGS) if config.pooling == PoolingType.SUM]
    host = HostEmbeddingBagCollection(configs, True, optimizer=SGD, threads=2)
    plain = EmbeddingBagCollection(tables=copy.deepcopy(configs), is_weighted=True)
    plain.load_state_dict(host.state_dict())
    ours = torch.linspace(-1, 1, 15).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    first, second = host(batch(ours)).values(), plain(batch(theirs)).values()
    torch.testing.assert_close(first, second)
    gradient = torch.randn_like(first)
    first.backward(gradient)
    second.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_weighted_mean_divides_by_the_number_of_ids() -> None:
    config = EmbeddingBagConfig(5, 3, "t", feature_names=["f"], pooling=PoolingType.MEAN)
    host = HostEmbeddingBagCollection([config], True, optimizer=SGD)
    weights = torch.tensor([2.0, 4.0, 5.0], requires_grad=True)
    rows = host.tables.weight("t").clone()
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 1, 2]), weights, lengths=torch.tensor([2, 1]))
    output = host(features).values()
    torch.testing.assert_close(output, torch.stack([(2 * rows[0] + 4 * rows[1]) / 2, 5 * rows[2]]))
    output.sum().backward()
    torch.testing.assert_close(weights.grad, torch.stack([rows[0].sum() / 2, rows[1].sum() / 2, rows[2].sum()]))


def test_embedding_collection_gives_what_torchrec_gives() -> None:
    configs = [
        EmbeddingConfig(11, 4, "users", feature_names=["user", "friend"]),
        EmbeddingConfig(7, 8, "products", feature_names=["item"]),
        EmbeddingConfig(5, 4, "tags", feature_names=["tag", "user"]),
    ]
    host = HostEmbeddingCollection(copy.deepcopy(configs), optimizer=SGD, threads=2)
    plain_configs = copy.deepcopy(configs)
    plain_configs[1].embedding_dim = 4
    host_same_dim = HostEmbeddingCollection(copy.deepcopy(plain_configs), optimizer=SGD, threads=2)
    plain = EmbeddingCollection(tables=plain_configs)
    plain.load_state_dict(host_same_dim.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    ours, theirs = host_same_dim(batch()), plain(batch())
    assert set(ours) == set(theirs)
    for name, jagged in theirs.items():
        assert torch.equal(ours[name].values(), jagged.values()), name
        assert torch.equal(ours[name].lengths(), jagged.lengths()), name
    sum((jagged.values() ** 2).sum() for jagged in ours.values()).backward()
    sum((jagged.values() ** 2).sum() for jagged in theirs.values()).backward()
    optimizer.step()
    for key, weight in plain.state_dict().items():
        torch.testing.assert_close(host_same_dim.state_dict()[key], weight)
    assert host(batch())["item"].values().shape == (3, 8)
    assert host.embedding_configs()[1].embedding_dim == 8


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_reading_does_not_update(how: str) -> None:
    host, _ = bag_pair()
    before = {key: value.clone() for key, value in host.state_dict().items()}
    if how == "eval":
        output = host.eval()(batch()).values()
    else:
        with getattr(torch, how)():
            output = host(batch()).values()
    assert not output.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in host.state_dict().items())
    assert host.tables.step == 0


def test_a_second_backward_is_refused_and_changes_nothing() -> None:
    host, _ = bag_pair()
    output = host(batch()).values().sum()
    output.backward(retain_graph=True)
    after_one = {key: value.clone() for key, value in host.state_dict().items()}
    with pytest.raises(RuntimeError, match="already updated the tables"):
        output.backward()
    assert all(torch.equal(value, after_one[key]) for key, value in host.state_dict().items())


def test_learning_rate_schedulers_drive_the_updates() -> None:
    host, _ = bag_pair()
    scheduler = torch.optim.lr_scheduler.LambdaLR(host.optimizer, lambda step: 0.0 if step == 1 else 1.0)
    changes = []
    for _ in range(3):
        before = host.tables.weight("users").clone()
        host(batch()).values().sum().backward()
        host.optimizer.step()
        scheduler.step()
        changes.append(not torch.equal(before, host.tables.weight("users")))
    assert changes == [True, False, True]


@pytest.mark.parametrize(("policy", "stands_for"), [("modulo", [3, 4]), ("fallback", [2, 2])])
def test_wrong_ids_can_stand_for_a_row(policy: str, stands_for: list[int]) -> None:
    def collection() -> HostEmbeddingBagCollection:
        config = EmbeddingBagConfig(5, 3, "t", feature_names=["f"])
        return HostEmbeddingBagCollection(
            [config], optimizer=SGD, invalid_ids=policy, fallback_row=2 * (policy != "modulo")
        )

    wrong, right = collection(), collection()
    lengths = torch.tensor([1, 1, 1])
    for host, ids in ((wrong, [8, -1, 1]), (right, [*stands_for, 1])):
        output = host(KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=lengths)).values()
        output.backward(torch.arange(9.0).reshape(3, 3))
    assert torch.equal(wrong.tables.weight("t"), right.tables.weight("t"))


def test_errors_of_misuse() -> None:
    host, _ = bag_pair()
    missing = KeyedJaggedTensor(["item"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(KeyError, match="feature 'user' of table 'users' is not in the batch"):
        host(missing)
    with pytest.raises(InvalidIdError, match="table 'products', feature 'item', sample 0: id 7 is outside"):
        wrong = batch()
        wrong.values()[0] = 7
        host.eval()(wrong)
    with pytest.raises(ValueError, match="fallback_row 5 is outside table 'tags' of 5 rows"):
        HostEmbeddingBagCollection(copy.deepcopy(CONFIGS), optimizer=SGD, invalid_ids="fallback", fallback_row=5)
    with pytest.raises(ValueError, match="fallback_row has a meaning only with invalid_ids: fallback"):
        from recsys_offload.embedding import EmbeddingSettings

        EmbeddingSettings(fallback_row=3)


def test_an_empty_batch() -> None:
    host, _ = bag_pair()
    keys = ["item", "user", "tag", "friend"]
    empty = KeyedJaggedTensor(
        keys, torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64), stride=0
    )
    output = host(empty).values()
    assert output.shape == (0, 24)
    output.sum().backward()


def test_state_dict_goes_both_ways_and_reports_what_does_not_fit() -> None:
    host, plain = bag_pair()
    with torch.no_grad():
        plain.embedding_bags["products"].weight.fill_(3.0)
    host.load_state_dict(plain.state_dict())
    assert torch.equal(host.tables.weight("products"), torch.full((7, 8), 3.0))
    assert list(host.state_dict()) == list(plain.state_dict())
    state = dict(plain.state_dict())
    state["embedding_bags.products.weight"] = torch.zeros(7, 9)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for embedding_bags.products.weight: \(7, 9\) given, \(7, 8\) here"
    ):
        host.load_state_dict(state)
    del state["embedding_bags.products.weight"]
    state["embedding_bags.more.weight"] = torch.zeros(1)
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*products.weight.*Unexpected key.*more.weight|Unexpected.*Missing"
    ):
        host.load_state_dict(state)


def test_collections_are_found_by_path() -> None:
    host, _ = bag_pair()
    model = torch.nn.ModuleDict({"part": torch.nn.Sequential(host, torch.nn.Linear(2, 2))})
    assert host_collections(model) == {"part.0": host}
    assert [name for name, _ in model.named_parameters()] == ["part.1.weight", "part.1.bias"]
    assert "part.0.embedding_bags.users.weight" in model.state_dict()
