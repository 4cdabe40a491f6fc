"""The results: rows, the table that shows them beside the paper's, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A result. ``unit`` is "fraction", "requests", "x" (how many times as much), "ms" or "tokens"."""

    name: str
    value: float
    unit: str
    reference: float | None = None  #: what the paper has, in the same unit

    @property
    def ratio(self) -> float | None:
        """The value over the paper's."""
        return self.value / self.reference if self.reference else None


def table(rows: Iterable[Row], reference: str = "paper") -> str:
    """The rows as text: name, value, the value of the ``reference``, and their ratio."""
    lines = [f"{'':44} {'here':>10} {reference:>10} {'ratio':>7}"]
    for row in rows:
        paper = "" if row.reference is None else shown(row.reference, row.unit)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.name:44} {shown(row.value, row.unit):>10} {paper:>10} {ratio:>7}".rstrip())
    return "\n".join(lines)


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "fraction":
        return f"{value:.1%}"
    return f"{value:.2f}x" if unit == "x" else f"{value:.1f}" + (f" {unit}" if unit == "ms" else "")


def write_json(rows: Iterable[Row], path: Path) -> None:
    """A list of objects with name, value, unit, reference (null where the paper has none) and ratio."""
    path.write_text(json.dumps([{**row._asdict(), "ratio": row.ratio} for row in rows], indent=1) + "\n")
