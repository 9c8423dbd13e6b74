"""What a tree of pydantic models allows: its dotted names, and the type of each."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["Field", "accepts_only_text", "dotted_names", "entry_models", "find_field", "section_models", "type_name"]


@dataclass(frozen=True)
class Field:
    """One place in the tree: a field of a section, or an entry of a section with free names (``is_entry``)."""

    annotation: Any
    is_entry: bool = False


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without ``Annotated`` around them; a single type is its own only member."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for argument in get_args(annotation) for member in alternatives(argument)]
    return [annotation]


def section_models(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a value of this type may be (several for a union)."""
    return [kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def entry_models(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes of the entries, where this type is a mapping from free names to settings."""
    return [
        model
        for kind in alternatives(annotation)
        if get_origin(kind) is dict
        for model in section_models(get_args(kind)[1])
    ]


def find_field(model: type[BaseModel], parts: Sequence[str]) -> Field | None:
    """The place that the dotted name ``parts`` means, or None where ``model`` has none."""
    models, field = [model], None
    free: Any = None
    for part in parts:
        if free is not None:
            field, free = Field(free, is_entry=True), None
        else:
            found = [candidate.model_fields[part].annotation for candidate in models if part in candidate.model_fields]
            if not found:
                return None
            field = Field(functools.reduce(operator.or_, found))
        models = section_models(field.annotation)
        mappings = [kind for kind in alternatives(field.annotation) if get_origin(kind) is dict]
        if mappings:
            free = get_args(mappings[0])[1]
    return field


def dotted_names(model: type[BaseModel], tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every valid dotted name, sections included, with the entries that ``tree`` has in sections of free names."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        value = tree.get(name)
        inner = value if isinstance(value, Mapping) else {}
        yield key
        for section in section_models(info.annotation):
            yield from dotted_names(section, inner, f"{key}.")
        for entry in entry_models(info.annotation):
            for entry_name, entry_value in inner.items():
                yield f"{key}.{entry_name}"
                yield from dotted_names(
                    entry, entry_value if isinstance(entry_value, Mapping) else {}, f"{key}.{entry_name}."
                )


def accepts_only_text(annotation: Any) -> bool:
    """Whether a value of this type is always text (or a path, or null)."""
    return all(kind in (str, Path, type(None)) for kind in alternatives(annotation))


def type_name(annotation: Any) -> str:
    """The type as ``--help`` shows it: ``int``, ``adam | sgd``, ``list of str``."""
    names: list[str] = []
    for kind in alternatives(annotation):
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is type(None):
            name = "null"
        elif origin is Literal:
            name = " | ".join(str(argument) for argument in arguments)
        elif origin in (list, tuple, set):
            name = f"list of {type_name(arguments[0])}" if arguments else "list"
        elif origin is dict:
            name = f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
        elif kind is str or kind is Path:
            name = "text" if kind is str else "path"
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            name = "section"
        else:
            name = {"ByteSize": "size"}.get(kind.__name__, kind.__name__)
        if name not in names:
            names.append(name)
    return " | ".join(names)


def constraint_text(info: FieldInfo) -> str:
    """The bounds of a number as ``--help`` shows them, such as ``>= 0, <= 1``; empty without bounds."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return ", ".join(
        f"{sign} {getattr(bound, name):g}"
        for bound in info.metadata
        for name, sign in signs.items()
        if getattr(bound, name, None) is not None
    )
