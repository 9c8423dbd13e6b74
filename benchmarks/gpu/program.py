"""Runs the parts one after the other, and reports each as soon as it is done."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import recsys_offload  # noqa: F401 - first: it sets how OpenMP's idle threads wait, which torch reads when it is loaded

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import exactness, overlap, step, transfer
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.expectations import findings
from benchmarks.gpu.options import PARTS, Options
from benchmarks.gpu.report import FAILED, Report, unmeasured
from benchmarks.gpu.workbench import Workbench

WIDTH = 150
PACKAGES = ("torch", "triton", "torchrec", "fbgemm_gpu", "fbgemm_gpu-cpu")
# What a part takes at least; where less is left it is not begun.
LEAST_SECONDS = {"exactness": 20.0, "transfer": 20.0, "step": 60.0, "overlap": 30.0}
NO_GPU = "benchmarks.gpu needs a GPU, and torch finds none. --rehearse runs the same code in small sizes on the CPU."
REHEARSAL = "THIS IS A REHEARSAL ON A CPU: it shows that the code runs, and no number in it means anything."


def run(options: Options) -> int:
    """All parts; the exit status: 0, 1 after a failure, 2 where there is no GPU."""
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    if not options.rehearse and not torch.accelerator.is_available():
        console.print(NO_GPU)
        return 2
    device = torch.device("cpu")
    if options.rehearse:
        console.print(REHEARSAL, style="bold")
    else:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    about = {**_about(device), "settings": _settings(options)}
    report = Report(PARTS, about, rehearsal=options.rehearse, copy_to=options.copy_to)
    report.save()  # what is wrong with writing it should be known before anything is measured
    workbench = Workbench(options, device)
    try:
        failed = _run_parts(options, device, workbench, report, console)
    finally:
        workbench.close()
    _summarise(report, failed, console, rehearsal=options.rehearse)
    if options.rehearse:
        console.print(REHEARSAL, style="bold")
    return int(bool(failed))


def _run_parts(
    options: Options, device: torch.device, workbench: Workbench, report: Report, console: Console
) -> list[str]:
    """Runs what was asked for and fits; the names of the parts that failed."""
    budget = Budget(options.budget_seconds)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "exactness": lambda: exactness.run(options, device, budget, console),
        "transfer": lambda: transfer.run(options, device, budget, console),
        "step": lambda: step.run(workbench, budget, console),
        "overlap": lambda: overlap.run(workbench, budget, console),
    }
    failed = []
    for name, part in parts.items():
        if name not in options.parts:
            report.set(name, unmeasured("not asked for (--parts)"))
        elif budget.left < LEAST_SECONDS[name]:
            report.set(name, unmeasured(f"{max(0.0, budget.left):.0f} s were left of --budget-seconds"))
        else:
            console.rule(name)
            start = time.monotonic()
            try:
                figures = part()
                if figures.get("failures"):
                    failed.append(name)
            except Exception as error:  # one part that does not work must not keep the others from being tried
                failed.append(name)
                figures = {"status": FAILED, "why": f"{type(error).__name__}: {error}"}
                console.print(traceback.format_exc(), markup=False, highlight=False)
            report.set(name, {**figures, "seconds": round(time.monotonic() - start, 1)})
    report.save(findings=findings(report.parts, rehearsal=options.rehearse), failed=failed)
    return failed


def _settings(options: Options) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}


def _about(device: torch.device) -> dict[str, Any]:
    """The device and the versions."""
    about: dict[str, Any] = {"device": device.type, "versions": {}}
    for name in PACKAGES:
        try:
            about["versions"][name] = version(name)
        except PackageNotFoundError:
            about["versions"][name] = "not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        about["versions"]["CUDA"] = torch.version.cuda
    return about


def _summarise(report: Report, failed: list[str], console: Console, *, rehearsal: bool) -> None:
    table = Table("part", "status", "seconds", "why", title="Parts")
    for name, part in report.parts.items():
        status = FAILED if name in failed else part["status"]
        table.add_row(name, status, str(part.get("seconds", "")), part.get("why", ""))
    console.print(table)
    table = Table("part", "expected", "found", "", title="Expected before, and found")
    for one in findings(report.parts, rehearsal=rehearsal):
        met = {True: "as expected", False: "not so", None: ""}[one["met"]]
        table.add_row(one["part"], one["expected"], one["found"], met)
    console.print(table)
    if report.path is not None:
        console.print(f"Wrote {report.path}")
