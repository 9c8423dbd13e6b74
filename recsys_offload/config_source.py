"""Where settings come from: a YAML file, and ``--dotted.name value`` pairs on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from recsys_offload.config_schema import accepts_only_text, dotted_names, find_field

__all__ = ["ConfigError", "apply_override", "parse_arguments", "read_yaml", "unknown_key"]


class ConfigError(ValueError):
    """Settings that cannot be used; the message names the key or the file, and what is allowed."""


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key given twice (YAML forbids it, PyYAML takes the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key_node.value}' is given twice", key_node.start_mark
                    )
                keys.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file ``path``; an empty file is an empty mapping.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not a YAML mapping; names the file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file '{path}' (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file '{path}': {error}") from error
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file must hold sections (`train:`, `data:`, ...), not a {type(tree).__name__}")
    return tree


def parse_arguments(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a command line into its positional arguments and its ``(dotted name, text)`` overrides.

    Raises:
        ConfigError: an option has no value.
    """
    positional: list[str] = []
    overrides: list[tuple[str, str]] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        key, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            value = next(remaining, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"--{key} needs a value: `--{key} VALUE` or `--{key}=VALUE`")
            text = value
        overrides.append((key, text))
    return positional, overrides


def apply_override(model: type[BaseModel], tree: dict[str, Any], key: str, text: str) -> None:
    """Set the dotted ``key`` in ``tree`` to the YAML (or JSON) value in ``text``.

    Raises:
        ConfigError: ``model`` has no such key, or ``text`` is not a value.
    """
    parts = key.split(".")
    field = find_field(model, parts)
    if field is None:
        raise unknown_key(model, tree, parts)
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{key}: '{text}' is not a YAML or JSON value: {error}") from error
    if accepts_only_text(field.annotation) and value is not None and not isinstance(value, str):
        value = text  # `--run.name 2026` is a name, not a number
    section = tree
    for depth, part in enumerate(parts[:-1], start=1):
        parent = find_field(model, parts[:depth])
        if parent is not None and parent.is_entry and part not in section:
            # A value inside an entry that the file does not have is a misspelt name, not a new feature.
            raise unknown_key(model, tree, parts)
        inner = section.get(part)
        section[part] = section = dict(inner) if isinstance(inner, dict) else {}
    section[parts[-1]] = value


def unknown_key(model: type[BaseModel], tree: Mapping[str, Any], parts: Sequence[str]) -> ConfigError:
    """The error for a key that ``model`` does not have, with the nearest that it has."""
    key = ".".join(parts)
    known = list(dotted_names(model, tree))
    nearest = next(_nearest(parts, known), None)
    hint = f"did you mean '{nearest}'?" if nearest else "--help lists them all."
    return ConfigError(f"unknown setting '{key}': {hint}")


def _nearest(parts: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Valid names like ``parts``: first those that differ in one component, then the same name in another section."""
    key = ".".join(parts)
    by_distance: list[tuple[float, str]] = []
    for name in known:
        other = name.split(".")
        if len(other) == len(parts):
            different = [(a, b) for a, b in zip(parts, other, strict=True) if a != b]
            if len(different) == 1:
                by_distance.append((difflib.SequenceMatcher(None, *different[0]).ratio(), name))
    yield from (name for ratio, name in sorted(by_distance, key=lambda item: -item[0]) if ratio >= 0.6)
    yield from (name for name in known if name.split(".")[-1] == parts[-1])
    yield from difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    leaves = {name.split(".")[-1]: name for name in reversed(known)}
    yield from (leaves[leaf] for leaf in difflib.get_close_matches(parts[-1], list(leaves), n=1, cutoff=0.75))
