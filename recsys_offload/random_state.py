"""The state of the global random generators: Python's, NumPy's, torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

__all__ = ["get_random_state", "set_random_state"]

_log = logging.getLogger(__name__)


def get_random_state() -> dict[str, Any]:
    """The state of all generators, as a tree that `state_tree.pack` accepts."""
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.array(keys)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached_gaussian),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put all generators into a state that `get_random_state` returned.

    Where the number of CUDA devices has changed, the devices in both are set and a warning is logged.
    """
    random.setstate(state["python"])
    numpy = state["numpy"]
    np.random.set_state(
        (numpy["name"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"])
    )
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices != len(state["cuda"]):
        _log.warning(
            "the checkpoint holds the random state of %d CUDA devices and %d are here: random numbers drawn on the "
            "devices will differ from those of an uninterrupted run",
            len(state["cuda"]),
            devices,
        )
    for device, device_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(device_state, device)
