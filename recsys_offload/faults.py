"""Finds what made a loss infinite or not a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from recsys_offload.data.batch import Batch
from recsys_offload.embedding.modules import HostEmbeddingBagCollection, host_collections

__all__ = ["NonFiniteLossError", "describe_fault", "naming_batch"]

EXTREME = 1e6
"""A dense input larger than this, where others are of order 1, can make activations overflow."""


class NonFiniteLossError(ArithmeticError):
    """The training loss is infinite or not a number."""


@contextlib.contextmanager
def naming_batch(batch: Batch) -> Iterator[None]:
    """Add where ``batch`` came from to a ValueError, such as that of a wrong id."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"This was in the batch of {len(batch)} examples that starts at {batch.origin}.")
        raise


def describe_fault(model: nn.Module, batch: Batch, dense_names: Sequence[str], step: int, loss: float) -> str:
    """The message for a loss that is not finite: the step, the batch, and the columns and parameters at fault.

    Args:
        batch: on whatever device.
        dense_names: of the columns of ``batch.dense``.
    """
    findings = [
        *(f"dense column '{name}': {text}" for name, text in _dense_faults(batch.dense, dense_names)),
        *_embedding_faults(model, batch),
    ]
    if batch.weights is not None and not batch.weights.isfinite().all():
        findings.append("sample weights: some are not finite")
    findings += [
        f"parameter '{name}': {_count(parameter)}"
        for name, parameter in model.named_parameters()
        if not parameter.isfinite().all()
    ]
    if not findings:
        findings = ["no input, row or parameter is at fault by itself: the activations overflowed"]
    listed = "\n".join(f"  - {finding}" for finding in findings)
    return (
        f"the loss is {loss} at step {step}, in the batch of {len(batch)} examples that starts at {batch.origin}.\n"
        f"{listed}\n"
        "Extreme inputs: give the column `transform: log1p` or `standardize`. Otherwise lower "
        "dense_optimizer.learning_rate or embedding.optimizer.learning_rate, add warm-up steps, or set "
        "train.gradient_clipping."
    )


def _dense_faults(dense: Tensor, names: Sequence[str]) -> list[tuple[str, str]]:
    faults = []
    for name, column in zip(names, dense.detach().cpu().unbind(1), strict=True):
        wrong = ~column.isfinite()
        if wrong.any():
            faults.append((name, f"{_count(column)}, the first in example {int(wrong.nonzero()[0])} of the batch"))
        elif (largest := column.abs().max().item()) > EXTREME:
            where = int(column.abs().argmax())
            faults.append((name, f"values up to {largest:.3g}, in example {where} of the batch"))
    return faults


def _embedding_faults(model: nn.Module, batch: Batch) -> list[str]:
    faults = []
    for collection in host_collections(model).values():
        if not isinstance(collection, HostEmbeddingBagCollection):
            continue
        with torch.no_grad():
            output = collection(batch.sparse)
        for feature, vectors in output.to_dict().items():
            wrong = ~vectors.isfinite().all(dim=1)
            if wrong.any():
                faults.append(
                    f"embedding of '{feature}': vectors that are not finite in {int(wrong.sum())} of {len(vectors)} "
                    f"examples, the first in example {int(wrong.nonzero()[0])} of the batch"
                )
    return faults


def _count(values: Tensor) -> str:
    return f"{int((~values.isfinite()).sum())} of {values.numel()} values are not finite"
