"""Makes data/movielens/ratings.parquet: MovieLens-100k, from the copy in the PyPI wheel recbole 1.2.1.

    python data/movielens.py

Quick where the file is there already. See data/README.md for the columns and the terms of use.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from wheel import build_once, open_wheel, read_delimited

OUTPUT = Path(__file__).resolve().parent / "movielens" / "ratings.parquet"
REQUIREMENT = "recbole==1.2.1"
SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k"
RATINGS, ITEMS, USERS = 100_000, 1_682, 943
LIKED = 4

SCHEMA = pa.schema(
    {
        "label": pa.int8(),
        "rating": pa.int8(),
        "user_id": pa.int32(),
        "item_id": pa.int32(),
        "age": pa.int32(),
        "gender": pa.string(),
        "occupation": pa.string(),
        "zip_code": pa.string(),
        "release_year": pa.int32(),
        "genres": pa.list_(pa.string()),
        "hour": pa.int32(),
        "weekday": pa.int32(),
        "timestamp": pa.int64(),
    }
)


def build() -> pa.Table:
    """Ratings in the order of the source, each with its user's and its item's features."""
    text, integer = pa.string(), pa.int32()
    with open_wheel(REQUIREMENT, SHA256) as wheel:
        ratings = read_delimited(
            wheel, f"{MEMBER}.inter", RATINGS,
            {"user_id": integer, "item_id": integer, "rating": pa.int8(), "timestamp": pa.int64()}, "\t",
        )  # fmt: skip
        items = read_delimited(
            wheel, f"{MEMBER}.item", ITEMS, {"item_id": integer, "release_year": text, "class": text}, "\t"
        )
        users = read_delimited(
            wheel, f"{MEMBER}.user", USERS,
            {"user_id": integer, "age": integer, "gender": text, "occupation": text, "zip_code": text}, "\t",
        )  # fmt: skip
    time = ratings["timestamp"].cast(pa.timestamp("s"))
    # Two films have a word in place of a year.
    year = pc.if_else(pc.match_substring_regex(items["release_year"], r"^\d{4}$"), items["release_year"], None)
    items = items.set_column(items.column_names.index("release_year"), "release_year", year)
    genres = pc.split_pattern(pc.fill_null(items["class"], ""), " ")
    columns = {
        "label": pc.greater_equal(ratings["rating"], LIKED).cast(pa.int8()),
        "hour": pc.hour(time),
        "weekday": pc.day_of_week(time),
    }
    for name, column in columns.items():
        ratings = ratings.append_column(name, column)
    for features, key in ((users, "user_id"), (items.append_column("genres", genres), "item_id")):
        rows = pc.index_in(ratings[key], features[key])
        if rows.null_count:
            sys.exit(f"error: {rows.null_count} ratings have a {key} without an entry in {REQUIREMENT}")
        for name in features.column_names:
            if name != key:
                ratings = ratings.append_column(name, features[name].take(rows))
    return ratings


if __name__ == "__main__":
    build_once(OUTPUT, SCHEMA, RATINGS, build)
