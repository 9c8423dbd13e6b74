"""What is wrong with settings, in messages that name the dotted key, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from recsys_offload.config_schema import entry_models, find_field, section_models
from recsys_offload.config_source import unknown_key

__all__ = ["check_keys", "explain"]


def check_keys(model: type[BaseModel], tree: Mapping[str, Any]) -> None:
    """Refuse the first key of ``tree``, at any depth, that ``model`` does not know.

    Raises:
        ConfigError: names the key and the nearest valid one.
    """
    _check(model, [model], tree, tree, ())


def _check(
    root: type[BaseModel],
    models: Sequence[type[BaseModel]],
    section: Mapping[str, Any],
    tree: Mapping[str, Any],
    path: tuple[str, ...],
) -> None:
    for key, value in section.items():
        infos = [model.model_fields[key] for model in models if key in model.model_fields]
        if not infos:
            raise unknown_key(root, tree, [str(part) for part in (*path, key)])
        if not isinstance(value, Mapping):
            continue
        for info in infos:
            if inner := section_models(info.annotation):
                _check(root, inner, value, tree, (*path, key))
            elif entries := entry_models(info.annotation):
                for name, entry in value.items():
                    if isinstance(entry, Mapping):
                        _check(root, entries, entry, tree, (*path, key, name))


def explain(error: ValidationError, model: type[BaseModel], tree: Mapping[str, Any], source: str) -> str:
    """The message for settings that pydantic refused: one line for each wrong key."""
    problems: dict[str, list[str]] = {}
    subjects: dict[str, str] = {}
    for details in error.errors():
        key, subject, problem = _describe(details, tree)
        subjects[key] = subject
        if problem not in problems.setdefault(key, []):
            problems[key].append(problem)
    lines = []
    for key, texts in problems.items():
        description = _description(model, key)
        lines.append(f"{subjects[key]}: {', or '.join(texts)}" + (f" ({description})" if description else ""))
    return f"{source}: {lines[0]}" if len(lines) == 1 else f"{source}:\n  " + "\n  ".join(lines)


def _describe(details: ErrorDetails, tree: Mapping[str, Any]) -> tuple[str, str, str]:
    """The dotted key of one error, what is said about it, and why."""
    key = ".".join(_place(details, tree))
    context = details.get("ctx", {})
    if details["type"] == "missing":
        return key, f"{key} is missing", "it must be given"
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = context["discriminator"].strip("'")
        key = f"{key}.{discriminator}"
        if "tag" not in context:
            return key, f"{key} is missing", "it must be given"
        return key, f"{key} cannot be {context['tag']!r}", f"it should be one of {context['expected_tags']}"
    problem = details["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
    if _is_value(key, tree):
        return key, f"{key} cannot be {_short(details['input'])}", problem
    return key, key or "settings", problem


def _place(details: ErrorDetails, tree: Mapping[str, Any]) -> list[str]:
    """The location without the names that pydantic adds for the members of unions."""
    place: list[str] = []
    current: Any = tree
    for index, part in enumerate(details["loc"]):
        is_key = isinstance(current, Mapping) and part in current
        is_item = isinstance(current, list) and isinstance(part, int) and part < len(current)
        if is_key or is_item:
            place.append(str(part))
            current = current[part]
        elif details["type"] == "missing" and index == len(details["loc"]) - 1:
            place.append(str(part))
    return place


def _is_value(key: str, tree: Mapping[str, Any]) -> bool:
    """Whether ``key`` is a single value in ``tree``, rather than a whole section."""
    current: Any = tree
    for part in key.split("."):
        current = current[int(part)] if isinstance(current, list) else current.get(part, {})
    return not isinstance(current, Mapping)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _description(model: type[BaseModel], key: str) -> str | None:
    *sections, name = key.split(".")
    parent = find_field(model, sections) if sections else None
    models = [model] if not sections else section_models(parent.annotation) if parent else []
    for candidate in models:
        if name in candidate.model_fields:
            return (candidate.model_fields[name].description or "").rstrip(".")
    return None
