"""The text of ``--help``: every setting with its dotted name, type, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recsys_offload.config_schema import constraint_text, entry_models, section_models, type_name

__all__ = ["SettingHelp", "print_help", "setting_helps"]


@dataclass(frozen=True)
class SettingHelp:
    """One line of the help."""

    key: str
    type: str
    default: str
    description: str


def setting_helps(model: type[BaseModel], prefix: str = "") -> Iterator[SettingHelp]:
    """Every setting below ``model``, depth first; the free names of a mapping are shown as ``<name>``."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        sections, entries = section_models(info.annotation), entry_models(info.annotation)
        if not sections or len(sections) > 1 or (not info.is_required() and _default(info) == "null"):
            kind = type_name(info.annotation)
            if bounds := constraint_text(info):
                kind = f"{kind} ({bounds})"
            yield SettingHelp(key, kind, _default(info), info.description or "")
        for section in sections:
            yield from setting_helps(section, f"{key}.")
        for entry in entries:
            yield from setting_helps(entry, f"{key}.<name>.")


def print_help(model: type[BaseModel], usage: str, console: Console) -> None:
    """Print the help, a table for each section."""
    console.print(f"{escape(usage)}\n", highlight=False)
    for name, info in model.model_fields.items():
        console.print(f"[bold]{escape(name)}[/bold]: {escape(info.description or '')}", highlight=False)
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
        for column, style in (("setting", "cyan"), ("type", ""), ("default", ""), ("meaning", "")):
            table.add_column(column, style=style, overflow="fold")
        for section in section_models(info.annotation):
            for line in setting_helps(section, f"{name}."):
                table.add_row(*(escape(text) for text in (f"--{line.key}", line.type, line.default, line.description)))
        console.print(table)
        console.print()


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(required)"
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "(section)"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
