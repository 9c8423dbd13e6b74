"""How the user states what the embedding tables are trained with."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from recsys_offload.settings import ByteSize, LearningRate, Rate, Settings

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
InvalidIds = Literal["error", "modulo", "fallback"]
Placement = Literal["auto", "device", "cached", "host"]
TransferName = Literal["auto", "staging", "zero_copy"]
KernelsName = Literal["auto", "triton", "torch", "fbgemm"]

_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*%\s*")


def slots_for(size: int | str, rows: int, row_bytes: int) -> int:
    """The slots that a cache size stands for, at least 1 and at most ``rows``.

    Args:
        size: rows (a number), a share of the rows (``10%``) or bytes (``2GiB``).
        rows: of the tables that share the cache.
        row_bytes: of one row with its state.

    Raises:
        ValueError: the size is none of these.
    """
    if isinstance(size, int):
        slots = size
    elif share := _SHARE.fullmatch(size):
        slots = math.ceil(rows * Fraction(share[1]) / 100)
    else:
        slots = TypeAdapter(ByteSize).validate_python(size) // row_bytes
    return min(max(slots, 1), rows)


def _check_cache_size(size: Any) -> Any:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(f"give rows (100000), a share of the rows (10%) or bytes (2GiB), not {size!r}")
    try:
        slots_for(size, 1, 1)
    except ValidationError as error:
        raise ValueError(f"give rows (100000), a share of the rows (10%) or bytes (2GiB), not {size!r}") from error
    if isinstance(size, int) and size < 1:
        raise ValueError(f"a cache needs at least 1 row, not {size}")
    if isinstance(size, str) and not _SHARE.fullmatch(size) and TypeAdapter(ByteSize).validate_python(size) == 0:
        raise ValueError(f"a cache needs at least the bytes of 1 row, not {size}")
    if isinstance(size, str) and (share := _SHARE.fullmatch(size)) and not 0 < float(share[1]) <= 100:
        raise ValueError(f"a share of the rows is more than 0% and at most 100%, not {size}")
    return size


CacheSize = Annotated[int | str, BeforeValidator(_check_cache_size)]
"""Rows, a share of the rows as ``10%``, or bytes as ``2GiB``."""


class SparseOptimizerSettings(Settings):
    """The optimizer of the embedding tables, applied to the rows of a batch during its backward pass."""

    name: OptimizerName = Field(
        "rowwise_adagrad",
        description="sgd; adagrad (one state value per weight); rowwise_adagrad (one per row); adam (lazy, as "
        "torch.optim.SparseAdam: rows absent from a batch are left alone).",
    )
    learning_rate: LearningRate = Field(0.01, description="Learning rate of the tables, before any schedule.")
    weight_decay: float = Field(
        0.0, ge=0.0, description="L2 penalty, added to the gradient of the rows that occur in a batch."
    )
    eps: float = Field(1e-8, gt=0.0, description="Added to the root of the second moment (adagrad, adam).")
    beta1: Rate = Field(0.9, lt=1.0, description="Decay of the first moment (adam).")
    beta2: Rate = Field(0.999, lt=1.0, description="Decay of the second moment (adam).")
    initial_accumulator: float = Field(
        0.0, ge=0.0, description="First value of the sum of squared gradients (adagrad, rowwise_adagrad)."
    )


class CacheSettings(Settings):
    """The cache of hot rows on the device."""

    size: CacheSize = Field(
        "10%",
        description="Its size: a share of the rows (10%), rows (100000) or bytes (2GiB, optimizer state included), "
        "shared by all cached tables.",
    )
    sizes: dict[str, CacheSize] = Field(
        default_factory=dict, description="Table: a size of its own, not shared with the others."
    )
    limit: CacheSize | None = Field(
        None,
        description="How far it may grow where one batch needs more rows than it has slots; null: as far as needed, "
        "with a warning.",
    )
    warm_start: bool = Field(
        False, description="Count the ids of the training part first, and begin with the most frequent rows cached."
    )
    transfer: TransferName = Field(
        "auto",
        description="How rows reach a GPU: staging (gathered into pinned buffers) or zero_copy (Triton kernels read "
        "and write the host's rows); auto: zero_copy where Triton is there.",
    )
    kernels: KernelsName = Field(
        "auto",
        description="What computes over the slots: triton, torch or fbgemm; auto: on a CPU the host's kernels, on a "
        "GPU triton, or torch where Triton is missing.",
    )


class EmbeddingSettings(Settings):
    """The embedding tables: where they are, their optimizer, wrong ids, and the threads that work on them."""

    optimizer: SparseOptimizerSettings = Field(
        default_factory=SparseOptimizerSettings, description="The optimizer of the tables."
    )
    invalid_ids: InvalidIds = Field(
        "error",
        description="What an id outside its table means: error; modulo (the id modulo the table's rows); fallback "
        "(the row named by fallback_row).",
    )
    fallback_row: int = Field(0, ge=0, description="The row that stands for wrong ids when invalid_ids is fallback.")
    threads: int | None = Field(
        None, ge=1, description="Threads that work on the tables; by default one per core this process may use."
    )

    placement: Placement = Field(
        "cached",
        description="Where rows are looked up and updated: device (all rows there), cached (hot rows there), host "
        "(only the result of the lookup goes there); auto: by device_memory and how skewed the ids are.",
    )
    placements: dict[str, Placement] = Field(
        default_factory=dict, description="Table: a placement of its own, other than the others'."
    )
    device_memory: ByteSize | None = Field(
        None, description="What auto may use of the device's memory; null: half of what is free."
    )
    look_ahead: int = Field(4, ge=0, description="Batches whose rows are looked after before they are trained on.")
    cache: CacheSettings = Field(default_factory=CacheSettings, description="The cache of hot rows on the device.")
    memory_limit: ByteSize | None = Field(
        None,
        description="Host memory that the tables and their optimizer state may take, as 8GiB; by default all that the "
        "machine has available.",
    )

    @model_validator(mode="after")
    def _check_fallback_is_asked_for(self) -> EmbeddingSettings:
        if self.fallback_row and self.invalid_ids != "fallback":
            raise ValueError("fallback_row has a meaning only with invalid_ids: fallback")
        return self
