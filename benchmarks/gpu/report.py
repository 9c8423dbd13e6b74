"""The report: what was measured, what was not and why; written after every part, so that a kill loses nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import write_report
from recsys_offload.durable_files import write_json

NAME = "gpu"
MEASURED, UNMEASURED, FAILED = "measured", "unmeasured", "failed"


def unmeasured(why: str) -> dict[str, Any]:
    """Stands where figures would."""
    return {"status": UNMEASURED, "why": why}


def show_missing(figures: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Says below a table why some of its rows have no figures."""
    reasons: dict[str, list[str]] = {}
    for name, one in figures.items():
        if not is_measured(one):
            reasons.setdefault(one["why"], []).append(name)
    for why, names in reasons.items():
        console.print(f"{UNMEASURED.capitalize()}: {'; '.join(names)}. {why}", markup=False)


def is_measured(figures: Any) -> bool:
    """Whether there are figures, and not a reason for their absence."""
    return isinstance(figures, Mapping) and figures.get("status", MEASURED) == MEASURED


class Report:
    """Parts with their figures, each ``unmeasured`` until it has some.

    Attributes:
        parts: name -> ``status``, and figures or the reason why there are none.
        path: of the report in ``benchmarks/results``; None for a rehearsal.
    """

    def __init__(
        self, parts: Sequence[str], about: Mapping[str, Any], *, rehearsal: bool, copy_to: Path | None
    ) -> None:
        """Args:
        parts: their names.
        about: the machine and the settings.
        rehearsal: whether nothing is written to ``benchmarks/results``.
        copy_to: a folder that gets a copy.
        """
        self.parts: dict[str, dict[str, Any]] = {name: unmeasured("the run ended before it") for name in parts}
        self.path: Path | None = None
        self._about = dict(about)
        self._rehearsal = rehearsal
        self._copy_to = copy_to

    def set(self, name: str, figures: dict[str, Any]) -> None:
        """Takes a part's figures and writes the report."""
        self.parts[name] = {"status": MEASURED, **figures}
        self.save()

    def save(self, **more: Any) -> None:
        """Writes the report as it is now, with ``more`` from now on."""
        self._about.update(more)
        figures = {"rehearsal": self._rehearsal, **self._about, "parts": self.parts}
        if not self._rehearsal:
            self.path = write_report(NAME, figures)
            figures = json.loads(self.path.read_text())
        if self._copy_to is not None:
            self._copy_to.mkdir(parents=True, exist_ok=True)
            write_json(self._copy_to / f"{NAME}.json", figures)
