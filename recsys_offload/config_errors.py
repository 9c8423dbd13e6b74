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
    values: dict[str, str] = {}
    for details in error.errors():
        key = ".".join(_place(details, tree))
        text = _problem(details)
        if text not in problems.setdefault(key, []):
            problems[key].append(text)
        values[key] = "is missing" if details["type"] == "missing" else f"cannot be {_short(details['input'])}"
    lines = []
    for key, texts in problems.items():
        field = find_field(model, key.split(".")) if key else None
        description = _description(model, key) if field is not None else None
        subject = f"{key} {values[key]}" if _is_value(key, tree) or values[key] == "is missing" else key or "settings"
        lines.append(f"{subject}: {', or '.join(texts)}" + (f" ({description})" if description else ""))
    return f"{source}: " + "\n  ".join(lines) if len(lines) == 1 else f"{source}:\n  " + "\n  ".join(lines)


def _place(details: ErrorDetails, tree: Mapping[str, Any]) -> list[str]:
    """The location without the names that pydantic adds for the members of unions."""
    place: list[str] = []
    current: Any = tree
    *_, last = details["loc"] or ("",)
    for part in details["loc"]:
        if (isinstance(current, Mapping) and part in current) or (
            isinstance(current, Sequence)
            and not isinstance(current, str)
            and isinstance(part, int)
            and part < len(current)
        ):
            place.append(str(part))
            current = current[part]  # type: ignore[index]
        elif details["type"] == "missing" and part == last:
            place.append(str(part))
    return place


def _is_value(key: str, tree: Mapping[str, Any]) -> bool:
    """Whether ``key`` is a single value in ``tree``, rather than a whole section."""
    current: Any = tree
    for part in key.split("."):
        current = current[int(part)] if isinstance(current, list) else current.get(part, {})
    return not isinstance(current, Mapping)


def _problem(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "it must be given"
    message = details["msg"].removeprefix("Value error, ")
    return message.replace("Input should", "it should", 1)


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
