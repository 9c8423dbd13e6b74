"""The device of the dense tower, and what makes its results repeatable."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

__all__ = ["choose_device", "make_repeatable"]


def choose_device(name: str) -> torch.device:
    """The device that ``train.device`` means: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ValueError: a GPU is asked for and there is none that this torch can use.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        build = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise ValueError(
            f"train.device is cuda, but torch {torch.__version__} ({build}) finds no GPU here: "
            "use train.device: auto or cpu, or install the driver and run the set-up again"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def make_repeatable(seed: int, deterministic: bool) -> None:
    """Seed every global random generator and, if asked, let torch choose only deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
        # Filling fresh memory only serves to find bugs, and costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
