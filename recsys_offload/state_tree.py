"""Nested state (optimizers, schedulers, random generators) as JSON plus named tensors, and back exactly.

JSON alone would turn tuples into lists, integer keys into text, and has no NaN. Whatever it cannot say is written as
an object with the key ``$``: ``{"$": "tuple", "items": [...]}``. Types that are not listed here are refused, so
nothing is ever pickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split ``tree`` into what JSON can hold and its tensors, named by their path (``state.0.exp_avg``).

    Raises:
        TypeError: the tree holds something other than None, bool, int, float, str, list, tuple, dict, Counter, Tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, (), tensors), tensors


def unpack(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `pack` was given, with ``tensors`` in it."""
    if isinstance(content, list):
        return [unpack(item, tensors) for item in content]
    if not isinstance(content, dict):
        return content
    kind = content.get("$")
    if kind is None:
        return {key: unpack(value, tensors) for key, value in content.items()}
    if kind == "tensor":
        return tensors[content["name"]]
    if kind == "float":
        return float(content["value"])
    items = [unpack(item, tensors) for item in content["items"]]
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(items)
    if kind == "counter":
        return Counter(dict(items))
    raise ValueError(f"saved state holds an unknown kind of value '{kind}'")


def _pack(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "value": str(float(value))}
    if isinstance(value, Tensor):
        name = _free_name(".".join(path), tensors)
        tensors[name] = value
        return {"$": "tensor", "name": name}
    if type(value) is list:
        return _pack_items(value, path, tensors)
    if type(value) is tuple:
        return {"$": "tuple", "items": _pack_items(value, path, tensors)}
    if isinstance(value, dict):
        if type(value) is not Counter and "$" not in value and all(type(key) is str for key in value):
            return {key: _pack(item, (*path, key), tensors) for key, item in value.items()}
        items = [[_pack(key, path, tensors), _pack(item, (*path, str(key)), tensors)] for key, item in value.items()]
        return {"$": "counter" if type(value) is Counter else "dict", "items": items}
    raise TypeError(f"cannot save '{'.'.join(path)}': a {type(value).__name__} is neither a tensor nor JSON-like")


def _pack_items(values: list | tuple, path: tuple[str, ...], tensors: dict[str, Tensor]) -> list:
    return [_pack(item, (*path, str(index)), tensors) for index, item in enumerate(values)]


def _free_name(name: str, tensors: dict[str, Tensor]) -> str:
    """``name``, or that with a number where keys with dots in them have led to the same path twice."""
    candidate, number = name, 2
    while candidate in tensors:
        candidate, number = f"{name}#{number}", number + 1
    return candidate
