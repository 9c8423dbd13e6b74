"""The base of every component's settings, and the value types they share."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["ByteSize", "LearningRate", "Rate", "Settings"]

_BYTES = re.compile(r"\s*(\d+(\.\d*)?|\.\d+)\s*[a-zA-Z]*\s*")


def _refuse_half_sizes(size: Any) -> Any:
    """Pydantic reads what a text begins with: it would take 1,000 for 1."""
    if isinstance(size, str) and not _BYTES.fullmatch(size):
        raise ValueError(f"give bytes, as 2GiB or 1000000, not {size!r}")
    return size


ByteSize = Annotated[pydantic.ByteSize, BeforeValidator(_refuse_half_sizes)]
"""An amount of memory: bytes, or a text such as 2GiB."""

Rate = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share of a whole, from 0 to 1."""

LearningRate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""A learning rate: finite and not negative."""


class Settings(BaseModel):
    """One section of the settings tree: typed, immutable, and refusing keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
