"""Whether training through a small cache leaves the same bits as training with every table on the device."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.compare import Tables, copy_tables, differences
from benchmarks.gpu.exactness_training import Kind, TableSpec, make_batches, make_collection, table_specs, train
from benchmarks.gpu.options import Options
from recsys_offload.embedding.config import CacheSettings, KernelsName, OptimizerName, TransferName

OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
KINDS: tuple[Kind, ...] = ("bags", "rows")
LANES: tuple[tuple[KernelsName, TransferName], ...] = (
    ("triton", "staging"),
    ("triton", "zero_copy"),
    ("torch", "staging"),
)
NOT_OFFERED = "torch with zero_copy: the package refuses it, since Triton's kernels do the copying"
DEPTHS = (0, 4)
# So much of the time may go into this part: the others must have some as well.
SHARE_OF_BUDGET = 0.4

Outcome = Literal["passed", "failed", "unmeasured"]


@dataclass(frozen=True)
class Check:
    """One table after one run, beside the same table after a run in which all were on the device.

    Attributes:
        optimizer: of the tables.
        pooling: ``sum``, ``mean`` or ``unpooled``.
        dim: of the table.
        kernels: over the slots.
        transfer: of the rows.
        depth: of the look-ahead.
        outcome: of the comparison.
        detail: what differs, or why there was no comparison.
    """

    optimizer: str
    pooling: str
    dim: int
    kernels: str
    transfer: str
    depth: int
    outcome: Outcome
    detail: str = ""


class _Exactness:
    def __init__(self, options: Options, device: torch.device, batches: list[KeyedJaggedTensor]) -> None:
        self._options = options
        self._device = device
        self._batches = batches

    def resident(self, kind: Kind, optimizer: OptimizerName, kernels: KernelsName) -> Tables:
        """The tables after a run with all of them on the device; staging brings them there."""
        return self._trained(kind, optimizer, "device", CacheSettings(kernels=kernels, transfer="staging"), 0)

    def on_host(self, kind: Kind, optimizer: OptimizerName) -> Tables:
        """The tables after a run over the host's rows themselves."""
        return self._trained(kind, optimizer, "host", CacheSettings(), 0)

    def cached(
        self, kind: Kind, optimizer: OptimizerName, kernels: KernelsName, transfer: TransferName, depth: int
    ) -> Tables:
        """The tables after a run through the cache."""
        cache = CacheSettings(size=self._options.exact_cache, kernels=kernels, transfer=transfer)
        return self._trained(kind, optimizer, "cached", cache, depth)

    def _trained(
        self,
        kind: Kind,
        optimizer: OptimizerName,
        placement: Literal["device", "cached", "host"],
        cache: CacheSettings,
        depth: int,
    ) -> Tables:
        specs = table_specs(kind, self._options.exact_dims)
        rows = self._options.exact_rows
        collection = make_collection(kind, specs, rows, optimizer, placement, cache, self._device)
        try:
            train(collection, self._batches, depth)
            if placement == "cached" and collection.statistics.counts().written_back == 0:
                raise RuntimeError("no changed row left the cache, so that nothing is tested: make it smaller")
            return copy_tables(collection)
        finally:
            if collection.cache is not None:
                collection.cache.close()


def _checks(
    specs: list[TableSpec], common: tuple[str, str, str, int], found: dict[str, tuple[Outcome, str]]
) -> list[Check]:
    optimizer, kernels, transfer, depth = common
    return [Check(optimizer, spec.pooling, spec.dim, kernels, transfer, depth, *found[spec.name]) for spec in specs]


def _compared(tables: Tables, resident: Tables) -> dict[str, tuple[Outcome, str]]:
    return {
        table: ("failed", "; ".join(unequal)) if unequal else ("passed", "")
        for table, unequal in differences(tables, resident).items()
    }


def run(options: Options, device: torch.device, budget: Budget, console: Console) -> dict[str, Any]:
    """All checks; those that no longer fit are ``unmeasured``."""
    budget = Budget(SHARE_OF_BUDGET * options.budget_seconds, budget)
    batches = make_batches(options.exact_rows, options.exact_batch_size, options.exact_steps)
    training = _Exactness(options, device, batches)
    checks: list[Check] = []
    equal_to_host: dict[str, list[bool]] = {}
    for optimizer, kind in itertools.product(OPTIMIZERS, KINDS):
        specs = table_specs(kind, options.exact_dims)
        residents: dict[str, Tables] = {}
        host: Tables | None = None
        for (kernels, transfer), depth in itertools.product(LANES, DEPTHS):
            common = (optimizer, kernels, transfer, depth)
            if budget.spent:
                late: tuple[Outcome, str] = ("unmeasured", "the time for this part was over")
                checks += _checks(specs, common, dict.fromkeys((spec.name for spec in specs), late))
                continue
            try:
                if kernels not in residents:
                    residents[kernels] = training.resident(kind, optimizer, kernels)
                    host = host or training.on_host(kind, optimizer)
                    same = not any(differences(residents[kernels], host).values())
                    equal_to_host.setdefault(kernels, []).append(same)
                tables = training.cached(kind, optimizer, kernels, transfer, depth)
                checks += _checks(specs, common, _compared(tables, residents[kernels]))
            except Exception as error:  # one lane that does not work must not keep the others from being tried
                raised: tuple[Outcome, str] = ("failed", f"{type(error).__name__}: {error}")
                checks += _checks(specs, common, dict.fromkeys((spec.name for spec in specs), raised))
    _show(checks, equal_to_host, console)
    counts = Counter(check.outcome for check in checks)
    return {
        "passed": counts["passed"],
        "unmeasured_checks": counts["unmeasured"],
        "failures": [_describe(check) for check in checks if check.outcome == "failed"],
        "resident_equals_host_kernels": {kernels: all(same) for kernels, same in equal_to_host.items()},
        "not_offered": [NOT_OFFERED],
        "checks": [asdict(check) for check in checks],
    }


def _describe(check: Check) -> str:
    return (
        f"{check.optimizer}, {check.pooling}, dim {check.dim}, {check.kernels}, {check.transfer}, depth {check.depth}: "
        f"{check.detail}"
    )


def _show(checks: list[Check], equal_to_host: dict[str, list[bool]], console: Console) -> None:
    table = Table(title="Cached against resident: tables and optimizer state equal to the bit (dims passed / compared)")
    table.add_column("optimizer")
    table.add_column("pooling")
    lanes = [(*lane, depth) for lane, depth in itertools.product(LANES, DEPTHS)]
    for kernels, transfer, depth in lanes:
        table.add_column(f"{kernels} {transfer} depth {depth}", justify="right")
    for optimizer, pooling in itertools.product(OPTIMIZERS, ("sum", "mean", "unpooled")):
        of_row = [check for check in checks if (check.optimizer, check.pooling) == (optimizer, pooling)]
        cells = []
        for lane in lanes:
            outcomes = [check.outcome for check in of_row if (check.kernels, check.transfer, check.depth) == lane]
            passed, compared = outcomes.count("passed"), len(outcomes) - outcomes.count("unmeasured")
            cell = f"{passed}/{compared}" if compared else "unmeasured"
            cells.append(f"[red]{cell} FAILED[/red]" if "failed" in outcomes else cell)
        table.add_row(optimizer, pooling, *cells)
    console.print(table)
    console.print(f"Not offered: {NOT_OFFERED}.")
    for name, same in equal_to_host.items():
        console.print(f"Resident with {name} kernels: {'the' if all(same) else 'not the'} bits of the host's kernels.")
    for check in checks:
        if check.outcome == "failed":
            console.print(f"FAILED: {_describe(check)}", style="red", markup=False, highlight=False)
