"""Whether two runs have left the same tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recsys_offload.embedding import HostCollection

Tables = Mapping[str, Mapping[str, Tensor]]
"""Table -> name of its values (``weight``, or one of its optimizer's states) -> float32 values."""


def copy_tables(collection: HostCollection) -> Tables:
    """A copy of all tables with their optimizer's state, after a flush."""
    collection.flush()
    tables = collection.tables
    return {
        name: {
            "weight": tables.weight(name).clone(),
            **{state: values.clone() for state, values in tables.optimizer_state(name).items()},
        }
        for name in tables.names
    }


def differences(one: Tables, other: Tables) -> dict[str, list[str]]:
    """What differs in so much as a bit: for every table of ``one``, the names of such values.

    Bits are compared, not numbers: zeros of both signs differ, and a NaN is equal to itself.
    """
    return {
        table: [
            f"{name}: {_describe(values, other[table][name])}"
            for name, values in all_values.items()
            if not torch.equal(values.view(torch.int32), other[table][name].view(torch.int32))
        ]
        for table, all_values in one.items()
    }


def _describe(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    unequal = one.view(torch.int32) != other.view(torch.int32)
    return f"{int(unequal.sum())} of {unequal.numel()} values differ, by up to {float((one - other).abs().max()):.3g}"
