"""The base of every component's settings, and the value types they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field

__all__ = ["ByteSize", "LearningRate", "Rate", "Settings"]

Rate = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share of a whole, from 0 to 1."""

LearningRate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""A learning rate: finite and not negative."""


class Settings(BaseModel):
    """One section of the settings tree: typed, immutable, and refusing keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
