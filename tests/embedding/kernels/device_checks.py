"""Checks that kernels on a device compute the same bits as the host's and as plain torch.

They run as a pytest file of their own, in a process that test_device.py starts: Triton's interpreter, which stands in
where there is no GPU, must be chosen before Triton is imported.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import SparseOptimizerSettings
from recsys_offload.embedding.config import OptimizerName
from recsys_offload.embedding.kernels import device, layout, reference
from recsys_offload.embedding.optimizers import CODES, state_columns, update_parameters
from recsys_offload.embedding.plan import GroupFeatures, Ids, make_plan
from recsys_offload.embedding.slots import HostSlots, SlotBatch
from recsys_offload.embedding.slots_device import DeviceSlots
from recsys_offload.embedding.store import HostTables
from recsys_offload.embedding.threads import KernelThreads

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DIMS = [1, 3, 8, 20, 64]
OPTIMIZERS = list(CODES)
SLOTS = 90
THREADS = KernelThreads(1)


@pytest.fixture(params=["device", "device_torch"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    try:
        return importlib.import_module(f"recsys_offload.embedding.kernels.{request.param}")
    except ModuleNotFoundError:
        pytest.skip(f"{request.param} is not there")


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """The same values, zeros of the same sign."""
    assert torch.equal(actual.cpu().contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def random_values(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of very different sizes, among them zeros of both signs and subnormal ones."""
    values = (random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, shape)).astype(np.float32)
    chosen = random.random(shape)
    values[chosen < 0.1] = -0.0
    values[(chosen >= 0.1) & (chosen < 0.15)] = 0.0
    values[(chosen >= 0.15) & (chosen < 0.2)] *= np.float32(1e-38)
    return values


@dataclass
class Case:
    """A batch with its slots on the host and on the device, equal to begin with.

    Attributes:
        random: for what else the check needs.
        batch: as slots.
        host: slots on the host.
        device: slots on the device.
        columns: of the lookup's output.
        weight: float32 ``[S, dim]``, the weights at the beginning.
        state: the optimizer's at the beginning, as the reference takes it.
    """

    random: np.random.Generator
    batch: SlotBatch
    host: HostSlots
    device: DeviceSlots
    columns: int
    weight: Tensor
    state: dict[str, Tensor]

    def gradient(self, rows: int) -> tuple[Tensor, Tensor]:
        """A gradient of the output, on the host, and on the device with its rows apart."""
        whole = torch.from_numpy(random_values(self.random, rows, self.columns + 3))
        return whole[:, 2:-1].contiguous(), whole.to(DEVICE)[:, 2:-1]

    def by_feature(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Of each feature, its ids' numbers, their slots, and the offsets of its bags from its first id."""
        parts = []
        for feature in range(len(self.batch.columns)):
            first_bag = feature * self.batch.batch_size
            offsets = self.batch.offsets[first_bag : first_bag + self.batch.batch_size + 1]
            ids = slice(int(offsets[0]), int(offsets[-1]))
            slots = torch.from_numpy(self.batch.slot_of_id[ids].astype(np.int64))
            parts.append((ids, slots, torch.from_numpy(offsets - offsets[0])))
        return parts

    def id_weights(self, ids: slice) -> Tensor | None:
        return torch.from_numpy(self.batch.weights[ids]) if len(self.batch.weights) else None


def make_batch(random: np.random.Generator, batch_size: int, longest: int, weighted: bool) -> KeyedJaggedTensor:
    """Bags of 0 to ``longest`` ids for three features; the smaller ids are the more frequent."""
    lengths = random.integers(0, longest + 1, 3 * batch_size)
    values = torch.from_numpy((40 * random.random(lengths.sum()) ** 3).astype(np.int64))
    weights = torch.from_numpy(random_values(random, len(values))) if weighted else None
    return KeyedJaggedTensor(["c", "a", "b"], values, weights, lengths=torch.from_numpy(lengths))


def make_case(
    kernels: ModuleType,
    keyed: KeyedJaggedTensor,
    random: np.random.Generator,
    dim: int,
    pooling: PoolingType | None = PoolingType.SUM,
    optimizer: OptimizerName = "sgd",
) -> Case:
    """A case with two tables, the first read by two features; ``pooling`` is that of the first, None for no pooling."""
    readers = {"t": ["a", "b"], "u": ["c"]}
    if pooling is None:
        configs = [EmbeddingConfig(40, dim, name, feature_names=features) for name, features in readers.items()]
    else:
        configs = [EmbeddingBagConfig(40, dim, name, feature_names=features) for name, features in readers.items()]
        configs[0].pooling = pooling
    tables = HostTables(configs, SparseOptimizerSettings(name="sgd"), 0, THREADS, pin=False)
    first_columns = {"t": 0, "u": 2 * dim} if pooling is not None else {"t": 0, "u": 0}
    features = GroupFeatures.describe(tables.groups[0], configs, first_columns, keyed.keys())
    ids = Ids.of(keyed, weighted=keyed.weights_or_none() is not None)
    plan = make_plan(tables.groups[0], features, ids, pooling is not None, "error", 0, THREADS)
    batch = SlotBatch.of(ids, features, plan, random.permutation(SLOTS)[: len(plan.rows)].astype(np.int32))

    state_widths = state_columns(optimizer, dim)
    host = HostSlots(dim, dim + sum(state_widths.values()), SLOTS, THREADS)
    host.rows[:] = random_values(random, *host.rows.shape)
    host.rows[:, dim:] = np.abs(host.rows[:, dim:])
    state, column = {}, dim
    for name, width in state_widths.items():
        part = torch.from_numpy(host.rows[:, column : column + width].copy())
        state[name] = part if width > 1 or optimizer != "rowwise_adagrad" else part[:, 0]
        column += width
    on_device = DeviceSlots(torch.from_numpy(host.rows.copy()).to(DEVICE), dim, kernels)
    columns = dim if pooling is None else 3 * dim
    return Case(random, batch, host, on_device, columns, torch.from_numpy(host.rows[:, :dim].copy()), state)


def check_lookup(case: Case) -> None:
    """Pools on the host, the device, and in plain torch."""
    size, dim = case.batch.batch_size, case.host.dim
    expected = torch.empty(size, case.columns)
    case.host.lookup_pooled(case.batch, expected)
    whole = torch.full((size, case.columns + 5), 7.0, device=DEVICE)
    case.device.lookup_pooled(case.batch, whole[:, 2:-3])
    assert_same_bits(whole[:, 2:-3], expected)
    assert (whole[:, :2] == 7).all() and (whole[:, -3:] == 7).all()
    for feature, (ids, slots, offsets) in enumerate(case.by_feature()):
        column = case.batch.columns[feature]
        pooled = reference.lookup_pooled(
            case.weight, slots, offsets, bool(case.batch.means[feature]), case.id_weights(ids)
        )
        assert torch.equal(pooled, expected[:, column : column + dim])


def check_update(case: Case, optimizer: OptimizerName, weight_decay: float, pooled: bool = True) -> None:
    """Updates on the host, on the device, and in plain torch."""
    settings = SparseOptimizerSettings(name=optimizer, learning_rate=0.1, weight_decay=weight_decay)
    gradient, on_device = case.gradient(case.batch.batch_size if pooled else len(case.batch.slot_of_id))
    parameters = update_parameters(settings, 0.1, 2)
    case.host.update(case.batch, gradient, CODES[optimizer], parameters)
    case.device.update(case.batch, on_device, CODES[optimizer], parameters)
    assert_same_bits(case.device.rows, torch.from_numpy(case.host.rows))
    check_against_reference(case, gradient, CODES[optimizer], parameters, pooled)


def check_against_reference(case: Case, gradient: Tensor, optimizer: int, parameters: np.ndarray, pooled: bool) -> None:
    gradients = [gradient]
    if pooled:
        gradients = [
            reference.id_gradients(
                gradient[:, case.batch.columns[feature] :][:, : case.host.dim],
                offsets,
                bool(case.batch.means[feature]),
                case.id_weights(ids),
            )
            for feature, (ids, _, offsets) in enumerate(case.by_feature())
        ]
    slots = torch.from_numpy(case.batch.slot_of_id.astype(np.int64))
    distinct, sums = reference.sum_by_row(slots, torch.cat(gradients))
    reference.update(optimizer, torch.from_numpy(parameters), case.weight, case.state, distinct, sums)
    state = [part if part.dim() == 2 else part[:, None] for part in case.state.values()]
    assert torch.equal(torch.cat([case.weight, *state], dim=1), torch.from_numpy(case.host.rows))


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_pooled_lookup(kernels: ModuleType, dim: int, weighted: bool, pooling: PoolingType) -> None:
    random = np.random.default_rng(dim)
    check_lookup(make_case(kernels, make_batch(random, 15, 4, weighted), random, dim, pooling))


def test_pooled_lookup_of_more_bags_than_a_program_takes(kernels: ModuleType) -> None:
    random = np.random.default_rng(0)
    check_lookup(make_case(kernels, make_batch(random, 2 * device.TILE // 3 + 1, 1, True), random, 1))


@pytest.mark.parametrize("dim", DIMS)
def test_lookup_of_rows(kernels: ModuleType, dim: int) -> None:
    random = np.random.default_rng(dim)
    case = make_case(kernels, make_batch(random, 15, 4, False), random, dim, None)
    expected = torch.empty(len(case.batch.slot_of_id), dim)
    case.host.lookup_rows(case.batch, expected)
    output = torch.full((len(expected), dim + 2), 7.0, device=DEVICE)
    case.device.lookup_rows(case.batch, output[:, 1:-1])
    assert_same_bits(output[:, 1:-1], expected)
    assert_same_bits(expected, case.weight[torch.from_numpy(case.batch.slot_of_id).long()])
    assert (output[:, 0] == 7).all() and (output[:, -1] == 7).all()


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("dim", DIMS)
def test_gradients_of_weights(kernels: ModuleType, dim: int, pooling: PoolingType) -> None:
    random = np.random.default_rng(dim)
    case = make_case(kernels, make_batch(random, 25, 4, True), random, dim, pooling)
    gradient, on_device = case.gradient(case.batch.batch_size)
    expected = case.host.weight_gradients(case.batch, gradient)
    assert_same_bits(case.device.weight_gradients(case.batch, on_device), expected)
    for feature, (ids, slots, offsets) in enumerate(case.by_feature()):
        lengths, column = offsets.diff(), case.batch.columns[feature]
        bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        products = reference.sum_columns(case.weight[slots] * gradient[bags, column : column + dim])
        counts = lengths[bags].float() if case.batch.means[feature] else torch.ones(len(bags))
        assert torch.equal(products / counts, expected[ids])


def test_a_negative_gradient_of_a_weight_that_vanishes_becomes_a_positive_zero(kernels: ModuleType) -> None:
    random = np.random.default_rng(0)
    case = make_case(kernels, make_batch(random, 25, 4, True), random, 1, PoolingType.MEAN)
    case.host.rows[:] = -1e-45
    case.device.rows.fill_(-1e-45)
    gradient = torch.ones(25, 3)
    expected = case.host.weight_gradients(case.batch, gradient)
    assert (expected == 0).any() and (expected < 0).any()
    assert_same_bits(case.device.weight_gradients(case.batch, gradient.to(DEVICE)), expected)


@pytest.mark.parametrize(
    ("pooling", "weighted", "weight_decay"),
    [
        (PoolingType.SUM, False, 0.0),
        (PoolingType.MEAN, False, 0.01),
        (PoolingType.MEAN, True, 0.0),
        (None, False, 0.01),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dim", DIMS)
def test_update(
    kernels: ModuleType,
    dim: int,
    optimizer: OptimizerName,
    pooling: PoolingType | None,
    weighted: bool,
    weight_decay: float,
) -> None:
    random = np.random.default_rng(dim)
    case = make_case(kernels, make_batch(random, 10, 3, weighted), random, dim, pooling, optimizer)
    check_update(case, optimizer, weight_decay, pooling is not None)


@pytest.mark.parametrize(("optimizer", "weighted"), [("sgd", False), ("rowwise_adagrad", True)])
def test_update_of_hot_rows(kernels: ModuleType, optimizer: OptimizerName, weighted: bool) -> None:
    random = np.random.default_rng(1)
    counts = [layout.CHUNK + 1, 2 * layout.CHUNK + 60, 100]
    values = np.concatenate([np.full(counts[0], 5), np.full(counts[1], 3), random.integers(0, 5, counts[2])])
    weights = torch.from_numpy(random_values(random, len(values))) if weighted else None
    lengths = torch.cat([(torch.arange(max(counts)) < count).long() for count in counts])
    keyed = KeyedJaggedTensor(["c", "a", "b"], torch.from_numpy(values), weights, lengths=lengths)
    check_update(make_case(kernels, keyed, random, 20, PoolingType.SUM, optimizer), optimizer, 0.01)


@pytest.mark.parametrize("batch_size", [0, 4])
def test_a_batch_without_ids(kernels: ModuleType, batch_size: int) -> None:
    random = np.random.default_rng(0)
    case = make_case(kernels, make_batch(random, batch_size, 0, False), random, 8, PoolingType.MEAN, "adam")
    output = torch.full((batch_size, case.columns), 7.0, device=DEVICE)
    case.device.lookup_pooled(case.batch, output)
    assert (output == 0).all()
    gradient = torch.ones(batch_size, case.columns, device=DEVICE)
    settings = SparseOptimizerSettings(name="adam")
    case.device.update(case.batch, gradient, layout.ADAM, update_parameters(settings, 0.1, 1))
    assert len(case.device.weight_gradients(case.batch, gradient)) == 0
    assert_same_bits(case.device.rows, torch.from_numpy(case.host.rows))


@pytest.mark.parametrize("width", [1, 9, 192])
def test_rows_move_from_the_host_and_back(width: int) -> None:
    random = np.random.default_rng(width)
    host = torch.from_numpy(random_values(random, 200, width))
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    rows, before = torch.full((150, width), 7.0, device=DEVICE), host.clone()
    host_rows, slots = torch.from_numpy(random.permutation(200)[:101]), torch.from_numpy(random.permutation(150)[:101])
    device.fetch_rows(host, host_rows.to(DEVICE), rows, slots.to(DEVICE))
    expected = torch.full((150, width), 7.0)
    expected[slots] = before[host_rows]
    assert_same_bits(rows, expected)

    rows += 1
    device.write_back_rows(host, host_rows.to(DEVICE), rows, slots.to(DEVICE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    before[host_rows] = expected[slots] + 1
    assert_same_bits(host, before)


def test_several_threads_may_launch_kernels() -> None:
    """Training and the transfer of rows do; Triton's interpreter runs one kernel at a time."""
    rows = torch.arange(64, dtype=torch.float32, device=DEVICE).reshape(16, 4)
    slots = torch.arange(16, dtype=torch.int32, device=DEVICE)

    def copy(_: int) -> bool:
        output = torch.empty(16, 4, device=DEVICE)
        device.lookup_rows(rows, 4, slots, output)
        return torch.equal(output, rows)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(copy, range(60)))
