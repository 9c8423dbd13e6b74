"""A small generated data set and the settings to train on it in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROWS = 1200


def write_data(path: Path, seed: int = 0, **columns: Any) -> None:
    """Clicks that depend on user, item and age; ``columns`` replace or add to those generated."""
    generator = np.random.default_rng(seed)
    user, item = generator.integers(0, 20, ROWS), generator.integers(0, 10, ROWS)
    age = generator.normal(40, 12, ROWS).astype(np.float32)
    score = 2 * np.sin(user) + 2 * np.cos(2.0 * item) + (age - 40) / 10
    generated = {
        "label": (generator.random(ROWS) < 1 / (1 + np.exp(-score))).astype(np.int8),
        "user": user,
        "item": item,
        "age": age,
        "tags": pa.array([generator.integers(0, 6, generator.integers(0, 4)).tolist() for _ in range(ROWS)]),
        "weight": generator.choice([0.5, 1.0, 2.0], ROWS),
        "day": np.arange(ROWS) // (ROWS // 10),
    }
    pq.write_table(pa.table({**generated, **columns}), path, row_group_size=250)


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """Settings that train on ``folder/clicks.parquet`` into ``folder/run``; ``sections`` are merged into them."""
    tree: dict[str, Any] = {
        "run": {"folder": str(folder / "run"), "seed": 3},
        "data": {
            "train": str(folder / "clicks.parquet"),
            "label": "label",
            "dense": {"age": {"transform": "standardize"}},
            "sparse": {
                "user": {"num_embeddings": 20},
                "item": {"num_embeddings": 10},
                "tags": {"num_embeddings": 6, "pooling": "mean"},
            },
            "split": {"by": "hash"},
        },
        "model": {"name": "dlrm", "embedding_dim": 8, "dense_layers": [16], "over_layers": [16]},
        "embedding": {"optimizer": {"name": "rowwise_adagrad", "learning_rate": 0.05}, "threads": 2},
        "dense_optimizer": {"name": "adam", "learning_rate": 0.005},
        "train": {"batch_size": 64, "epochs": 3, "device": "cpu", "threads": 1},
        "logging": {"interval_steps": 5, "plain_interval_seconds": 0.0, "tensorboard": False},
    }
    return _merge(tree, sections)


def write_settings(folder: Path, **sections: Any) -> Path:
    """Write the data and the settings into ``folder``; returns the path of the YAML file."""
    if not (folder / "clicks.parquet").exists():
        write_data(folder / "clicks.parquet")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings(folder, **sections), sort_keys=False))
    return path


def _merge(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
