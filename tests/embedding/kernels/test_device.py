"""Device kernels compute the bits of the host: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsys_offload.embedding.kernels import layout

triton = pytest.importorskip("triton")

CHECKS = Path(__file__).with_name("device_checks.py")
KERNELS = ["lookup_pooled", "lookup_rows", "weight_gradients", "sum_chunks", "update", "copy_rows"]
POINTERS = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}
ARITHMETIC = re.compile(r"\b(?:add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt)\b[a-z.]*\.f32\b")
# Each of them rounds once, to nearest, and keeps subnormal numbers.
ROUNDED = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"}


def run_checks(interpret: str) -> None:
    """Runs device_checks.py in a process of its own: Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = interpret
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_interpreted_kernels_compute_the_bits_of_the_host() -> None:
    run_checks(interpret="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_kernels_compute_the_bits_of_the_host() -> None:
    run_checks(interpret="0")


class CompileOnly:
    """Stands in for a kernel: compiles it for the arguments of a launch, and launches nothing."""

    def __init__(self, kernel: Any, programs: dict[str, str]) -> None:
        """Args:
        kernel: that is compiled.
        programs: gets the PTX by the kernel's name.
        """
        self._kernel = kernel
        self._programs = programs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *arguments: Any, **keywords: Any) -> None:
        names = self._kernel.arg_names
        given = dict(zip(names, arguments, strict=False))
        given.update({name: value for name, value in keywords.items() if name in names})
        options = {name: value for name, value in keywords.items() if name not in names}
        signature = {
            parameter.name: "constexpr" if parameter.is_constexpr else self._type(parameter, given[parameter.name])
            for parameter in self._kernel.params
        }
        constants = {name: given[name] for name, kind in signature.items() if kind == "constexpr"}
        source = triton.compiler.ASTSource(self._kernel, signature, constexprs=constants)
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        self._programs[self._kernel.__name__] = triton.compile(source, target=target, options=options).asm["ptx"]

    @staticmethod
    def _type(parameter: Any, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "constexpr" if value == 1 and not parameter.do_not_specialize else "i32"


def launch_all(device: Any, dim: int, optimizer: int, weighted: bool) -> None:
    """Calls every function of the module once."""
    integers, longs = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    rows, matrix = torch.zeros(3, 3 * dim), torch.zeros(3, dim)
    floats, means = torch.zeros(3 if weighted else 0), torch.zeros(1, dtype=torch.bool)
    parameters = np.full(layout.UPDATE_PARAMETERS, 0.1 if weighted else 0.0, np.float32)
    device.lookup_pooled(rows, dim, integers, integers, floats, integers, means, matrix)
    device.lookup_rows(rows, dim, integers, matrix)
    device.weight_gradients(rows, dim, integers, integers, integers, means, matrix, torch.zeros(3))
    device.update(
        rows, dim, optimizer, parameters, integers, integers, matrix, integers, integers, floats, *[integers] * 3
    )
    device.fetch_rows(rows, longs, rows, longs)
    device.write_back_rows(rows, longs, rows, longs)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(
    ("dim", "optimizer", "weighted"),
    [
        (1, layout.SGD, False),
        (3, layout.ADAM, True),
        (20, layout.ROWWISE_ADAGRAD, False),
        (64, layout.ADAGRAD, True),
        (600, layout.ROWWISE_ADAGRAD, True),
    ],
)
def test_kernels_compile_without_fused_or_approximate_arithmetic(
    dim: int, optimizer: int, weighted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from recsys_offload.embedding.kernels import device

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    programs: dict[str, str] = {}
    for name in KERNELS:
        monkeypatch.setattr(device, f"{name}_kernel", CompileOnly(getattr(device, f"{name}_kernel"), programs))
    launch_all(device, dim, optimizer, weighted)
    assert len(programs) == len(KERNELS)
    arithmetic = {name: set(ARITHMETIC.findall(program)) for name, program in programs.items()}
    assert set().union(*arithmetic.values()) <= ROUNDED
    assert not arithmetic["copy_rows_kernel"] | arithmetic["lookup_rows_kernel"]
    assert ("sqrt.rn.f32" in arithmetic["update_kernel"]) == (optimizer != layout.SGD)
