"""The choice of the device."""

from __future__ import annotations

import pytest
import torch

from recsys_offload.device import choose_device, make_repeatable


def test_auto_and_cpu() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"train\.device is cuda, but .* finds no GPU"):
        choose_device("cuda")


def test_the_seed_sets_every_generator() -> None:
    make_repeatable(5, deterministic=False)
    first = torch.rand(3)
    make_repeatable(5, deterministic=False)
    assert torch.equal(first, torch.rand(3))
