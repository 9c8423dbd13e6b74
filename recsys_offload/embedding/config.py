"""How the user states what the embedding tables are trained with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from recsys_offload.settings import ByteSize, LearningRate, Rate, Settings

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
InvalidIds = Literal["error", "modulo", "fallback"]


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


class EmbeddingSettings(Settings):
    """The embedding tables: their optimizer, wrong ids, and the threads that work on them."""

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
