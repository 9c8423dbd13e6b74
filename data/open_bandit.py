"""Makes data/open_bandit/clicks.parquet: the Open Bandit click log's sample, from the PyPI wheel obp 0.4.1.

    python data/open_bandit.py

Quick where the file is there already. See data/README.md for the columns, and the credit that CC BY 4.0 asks for.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from wheel import build_once, open_wheel, read_delimited

OUTPUT = Path(__file__).resolve().parent / "open_bandit" / "clicks.parquet"
REQUIREMENT = "obp==0.4.1"
SHA256 = "87dec9caf4283c25ab13036532e0a24566f1c7bdcad1653a8ded43b2f5ef8208"
FOLDER = "obp/dataset/obd"
POLICIES = ("random", "bts")
ITEMS = {"all": 80, "men": 34, "women": 46}
ROUNDS = 10_000
ROWS = ROUNDS * len(POLICIES) * len(ITEMS)

USER_FEATURES = {f"user_feature_{index}": pa.string() for index in range(4)}
ITEM_FEATURES = {"item_feature_0": pa.float32()} | {f"item_feature_{index}": pa.string() for index in range(1, 4)}

SCHEMA = pa.schema(
    {
        "label": pa.int8(),
        "policy": pa.string(),
        "campaign": pa.string(),
        "position": pa.int32(),
        "item_id": pa.int32(),
        **ITEM_FEATURES,
        **USER_FEATURES,
        "affinity": pa.float32(),
        "affinity_items": pa.list_(pa.int32()),
        "affinity_weights": pa.list_(pa.float32()),
        "hour": pa.int32(),
        "weekday": pa.int32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "propensity_score": pa.float32(),
    }
)


def affinities(clicks: pa.Table, items: int, first_item: int) -> dict[str, pa.Array]:
    """The past clicks of a row's user on each item (one column an item, mostly zeros) as lists, and the shown item's.

    Args:
        items: of the campaign.
        first_item: the id in this data set of the campaign's item 0.
    """
    matrix = pa.concat_arrays(clicks[f"user-item_affinity_{item}"].combine_chunks() for item in range(items))
    matrix = matrix.to_numpy().reshape(items, -1).T
    rows, columns = matrix.nonzero()
    offsets = pa.array([0, *(matrix != 0).sum(axis=1).cumsum().tolist()], pa.int32())
    shown = matrix[range(len(matrix)), clicks["item_id"].to_numpy()]
    return {
        "affinity": pa.array(shown),
        "affinity_items": pa.ListArray.from_arrays(offsets, pa.array(columns + first_item, pa.int32())),
        "affinity_weights": pa.ListArray.from_arrays(offsets, pa.array(matrix[rows, columns])),
    }


def read_campaign(wheel: zipfile.ZipFile, policy: str, campaign: str, first_item: int) -> pa.Table:
    """The rounds of one policy in one campaign, with the features of the shown item."""
    items = ITEMS[campaign]
    types = {"timestamp": pa.string(), "click": pa.int8(), "item_id": pa.int32(), "position": pa.int32()}
    types |= {"propensity_score": pa.float32()} | USER_FEATURES
    types |= {f"user-item_affinity_{item}": pa.float32() for item in range(items)}
    clicks = read_delimited(wheel, f"{FOLDER}/{policy}/{campaign}/{campaign}.csv", ROUNDS, types)
    # Each policy's log hashes the items' features with a salt of its own. The items are the same: read one policy's.
    context = read_delimited(
        wheel, f"{FOLDER}/random/{campaign}/item_context.csv", items, {"item_id": pa.int32(), **ITEM_FEATURES}
    )
    shown = context.take(pc.index_in(clicks["item_id"], context["item_id"]))
    timestamp = clicks["timestamp"].cast(SCHEMA.field("timestamp").type)
    clock = timestamp.cast(pa.timestamp("us"))
    return pa.table(
        {
            "label": clicks["click"],
            "policy": pa.repeat(policy, ROUNDS),
            "campaign": pa.repeat(campaign, ROUNDS),
            "position": clicks["position"],
            "item_id": pc.add(clicks["item_id"], first_item),
            **{name: shown[name] for name in ITEM_FEATURES},
            **{name: clicks[name] for name in USER_FEATURES},
            **affinities(clicks, items, first_item),
            "hour": pc.hour(clock),
            "weekday": pc.day_of_week(clock),
            "timestamp": timestamp,
            "propensity_score": clicks["propensity_score"],
        }
    )


def build() -> pa.Table:
    """All rounds, in the order of time."""
    parts = []
    with open_wheel(REQUIREMENT, SHA256) as wheel:
        for policy in POLICIES:
            first_item = 0
            for campaign, items in ITEMS.items():
                parts.append(read_campaign(wheel, policy, campaign, first_item).cast(SCHEMA))
                first_item += items
    return pa.concat_tables(parts).sort_by("timestamp")


if __name__ == "__main__":
    build_once(OUTPUT, SCHEMA, ROWS, build)
