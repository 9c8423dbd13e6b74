"""How the user states which files to read and what their columns mean."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from recsys_offload.settings import Rate, Settings

Part = Literal["train", "validation", "test", "all"]
FLOAT32_MAX = 3.4e38
PARTS: tuple[Part, ...] = ("train", "validation", "test")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _date_as_text(value: Any) -> Any:
    """YAML reads an unquoted 2024-03-11 as a date."""
    return value.isoformat() if isinstance(value, datetime.date) else value


Seed = Annotated[int, Field(ge=0, lt=2**63)]


class DenseColumn(Settings):
    """One column of the dense matrix."""

    column: str | None = Field(None, description="Column of the file; by default the feature's name.")
    transform: Literal["none", "log1p", "standardize"] = Field(
        "none",
        description="none; log1p, which is sign(x) * log(1 + |x|); or standardize, by the mean and standard deviation "
        "of the training part.",
    )
    fill: float = Field(
        0.0, ge=-FLOAT32_MAX, le=FLOAT32_MAX, description="What stands for a null or NaN, after the transform."
    )


class SparseColumn(Settings):
    """One feature of ids."""

    column: str | None = Field(None, description="Column of the file, scalar or list; by default the feature's name.")
    encoding: Literal["ids", "hash", "vocabulary"] = Field(
        "ids",
        description="ids: integers that are rows of the table; hash: strings or integers, hashed to rows; vocabulary: "
        "the distinct values of the training part, by frequency, from row 1 on; row 0 stands for all others.",
    )
    num_embeddings: int = Field(ge=1, description="Rows of the table.")
    table: str | None = Field(
        None, description="Name of the table; by default the feature's. Features with the same name share it."
    )
    pooling: Literal["sum", "mean"] = Field("sum", description="How the rows of a bag are combined.")
    weights: str | None = Field(None, description="Column with a weight for each id, of the same shape as the ids.")
    nulls: Literal["skip"] | Annotated[int, Field(ge=0)] = Field(
        "skip", description="skip (a null is no id; a bag may be empty), or the row that stands for a null."
    )

    @model_validator(mode="after")
    def _check_null_row(self) -> SparseColumn:
        if self.nulls != "skip" and self.nulls >= self.num_embeddings:
            raise ValueError(f"nulls: row {self.nulls} is outside a table of {self.num_embeddings} rows")
        return self


class Shares(Settings):
    """How much of the data each part gets."""

    train: Rate = Field(0.8, description="Share of the training part.")
    validation: Rate = Field(0.1, description="Share of the validation part.")
    test: Rate = Field(0.1, description="Share of the test part.")

    @model_validator(mode="after")
    def _check_sum(self) -> Shares:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the shares must add up to 1, not {total:g}")
        return self


class HashSplit(Settings):
    """A random split, the same for every run with this seed."""

    by: Literal["hash"] = Field("hash", description="Split at random.")
    key: list[str] = Field(
        [],
        description="Columns whose values decide, so that rows which agree in them stay together; by default every "
        "row for itself, by its number, for which the files must stay the same and in the same order.",
    )
    shares: Shares = Field(default_factory=Shares, description="Size of each part.")
    seed: Seed = Field(0, description="Another seed gives another split.")

    _key_as_list = field_validator("key", mode="before")(_as_list)


class ColumnSplit(Settings):
    """A split that the data itself names."""

    by: Literal["column"] = Field("column", description="Split by the values of a column.")
    column: str = Field(description="The column.")
    train: list[str | int] = Field(description="Its values in the training part.")
    validation: list[str | int] = Field([], description="Its values in the validation part.")
    test: list[str | int] = Field([], description="Its values in the test part.")

    @model_validator(mode="after")
    def _check_values(self) -> ColumnSplit:
        values = [value for part in (self.train, self.validation, self.test) for value in dict.fromkeys(map(str, part))]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"the value {twice!r} stands in more than one part")
        return self


class TimeSplit(Settings):
    """The oldest rows for training, the newest for the test."""

    by: Literal["time"] = Field("time", description="Split by time.")
    column: str = Field(description="A timestamp, date or number that rises with time.")
    validation_from: str | int | float | None = Field(
        None,
        description="First time of the validation part: a number, or for a column of times an ISO date, in UTC if it "
        "names no offset; by default from shares.",
    )
    test_from: str | int | float | None = Field(None, description="First time of the test part, likewise.")
    shares: Shares = Field(default_factory=Shares, description="Size of each part where no times are given.")

    _dates_as_text = field_validator("validation_from", "test_from", mode="before")(_date_as_text)

    @model_validator(mode="after")
    def _check_times(self) -> TimeSplit:
        if (self.validation_from is None) != (self.test_from is None):
            raise ValueError("give both validation_from and test_from, or neither")
        return self


class ShuffleSettings(Settings):
    """The order of the training rows, by seed and epoch."""

    files: bool = Field(True, description="Shuffle the files.")
    row_groups: bool = Field(True, description="Shuffle the row groups, within a file or over all with files.")
    buffer_rows: int = Field(
        200_000,
        ge=0,
        description="Row groups are gathered until they hold this many rows, which are then permuted; 0 keeps them.",
    )


class DataSettings(Settings):
    """Parquet files, the meaning of their columns, and how they are split and read."""

    train: list[str] = Field(
        description="Parquet files: a file, a directory, a glob, or a list of these. The other parts are cut from "
        "them, unless they have files of their own."
    )
    validation: list[str] = Field([], description="Files of the validation part, where it has its own.")
    test: list[str] = Field([], description="Files of the test part, where it has its own.")
    label: str = Field("label", description="Column with the label, 0 or 1.")
    sample_weight: str | None = Field(None, description="Column with a weight for each row.")
    dense: dict[str, DenseColumn] = Field({}, description="Dense features, in the order of the matrix.")
    sparse: dict[str, SparseColumn] = Field({}, description="Sparse features, in the order of the keys.")
    split: Annotated[HashSplit | ColumnSplit | TimeSplit, Field(discriminator="by")] | None = Field(
        None, description="How the train files are cut in parts; by default all of them are for training."
    )
    shuffle: ShuffleSettings = Field(default_factory=ShuffleSettings, description="The order of the training rows.")
    hash_seed: Seed = Field(0, description="Seed of the hash of strings and integers.")
    read_ahead: int = Field(3, ge=1, description="Row groups read ahead; memory holds as many.")
    threads: int | None = Field(
        None, ge=1, description="Row groups decoded at a time; by default one per core, at most read_ahead."
    )

    _paths_as_lists = field_validator("train", "validation", "test", mode="before")(
        lambda value: [] if value is None else _as_list(value)
    )

    @model_validator(mode="after")
    def _check_paths(self) -> DataSettings:
        if not self.train:
            raise ValueError("train names no file")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> DataSettings:
        for part in ("validation", "test"):
            if getattr(self, part) and self._cuts(part):
                raise ValueError(
                    f"{part} has files of its own, and split cuts it from the train files too, whose rows nobody would "
                    f"read: leave {part} out of the split (with shares: {part}: 0)"
                )
        return self

    def _cuts(self, part: str) -> bool:
        """Whether the split gives a part rows of the train files, as far as the settings tell."""
        if isinstance(self.split, ColumnSplit):
            return bool(getattr(self.split, part))
        if isinstance(self.split, TimeSplit) and self.split.test_from is not None:
            return False
        return self.split is not None and getattr(self.split.shares, part) > 0
