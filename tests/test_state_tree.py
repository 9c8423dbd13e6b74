"""Nested state as JSON and tensors, and back with every type and bit."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys_offload.state_tree import pack, unpack


def through_json(tree: Any) -> Any:
    content, tensors = pack(tree)
    return unpack(json.loads(json.dumps(content, allow_nan=False)), tensors)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found is expected
    elif isinstance(expected, dict):
        assert list(found) == list(expected) and [type(key) for key in found] == [type(key) for key in expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found)
    else:
        assert found == expected
        if isinstance(expected, float):
            assert math.copysign(1, found) == math.copysign(1, expected)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [True, False, 0, 1, -(2**70), 0.1, -0.0, 5e-324, 1.7976931348623157e308, "", "µ\u2028\n"],
        [math.inf, -math.inf, math.nan],
        ((0.9, 0.999), [], (), {}, [()]),
        {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}, 1: {"momentum_buffer": None}},
        {"1": 1, 1: 2, False: 3, (1, "a"): 4, None: 5},
        {"$": "tensor", "name": "x"},
        {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "a.b#2": torch.ones(2)},
        Counter({3: 2, 5: 1}),
    ],
)
def test_round_trip(tree: Any) -> None:
    assert_same(through_json(tree), tree)


def test_an_ordered_dict_comes_back_as_a_dict_in_its_order() -> None:
    assert_same(through_json(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


def test_tensors_are_named_by_their_path() -> None:
    _, tensors = pack({"state": {0: {"exp_avg": torch.zeros(1)}}, "list": [torch.zeros(2)]})
    assert list(tensors) == ["state.0.exp_avg", "list.0"]


@pytest.mark.parametrize("value", [object(), lambda: 1, {1, 2}, b"bytes", 1j])
def test_what_would_need_pickle_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"'state\.0\.x': a {type(value).__name__}"):
        pack({"state": [{"x": value}]})
