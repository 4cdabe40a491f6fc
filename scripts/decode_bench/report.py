"""The results: values of all rounds, the rows made of them, the table, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from .processes import OURS

BEST = "/best"  #: at the end of the name of a row that is not of medians
LESS_IS_BETTER = ("s", "MiB")
DIGITS = {"tok/s": 1, "s": 3, "MiB": 0, "GB/s": 1}


class Row(NamedTuple):
    """A result. ``unit`` is "tok/s", "s", "MiB", "GB/s" or "fraction"."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None  #: in the same unit

    @property
    def ratio(self) -> float | None:
        """The value over the peer's."""
        return self.value / self.peer_value if self.peer_value else None


class Results:
    """What every round measured of every side, by the name of the row."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}
        self._units: dict[str, str] = {}

    def add(self, name: str, side: str, value: float, unit: str) -> None:
        """Keep a value; rows come in the order in which names were first seen."""
        self._units[name] = unit
        self._values.setdefault(name, {}).setdefault(side, []).append(value)

    def median(self, name: str, side: str) -> float | None:
        """The median of a side's values, None where it has none."""
        values = self._values.get(name, {}).get(side)
        return median(values) if values else None

    def rows(self) -> list[Row]:
        """Medians, then the best of all rounds, a row for each peer; one without a peer where minipage was alone."""
        rows: list[Row] = []
        for name, values in self._values.items():
            unit = self._units[name]
            best = min if unit in LESS_IS_BETTER else max
            rows += _rows(name, unit, {side: median(each) for side, each in values.items()})
            if max(map(len, values.values())) > 1:
                rows += _rows(name + BEST, unit, {side: best(each) for side, each in values.items()})
        return rows


def _rows(name: str, unit: str, values: dict[str, float]) -> list[Row]:
    ours = values.get(OURS)
    if ours is None:
        return []
    peers = [(side, value) for side, value in values.items() if side != OURS]
    return [Row(name, ours, unit, side, value) for side, value in peers] or [Row(name, ours, unit)]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a line for each name: medians, the best in brackets, and the ratio of medians for each peer."""
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer is not None))
    bests = {(row.name, row.peer): row for row in rows if row.name.endswith(BEST)}
    lines = [f"{'':34} {OURS:>20}" + "".join(f" {peer:>20} {'ratio':>6}" for peer in peers)]
    for name in dict.fromkeys(row.name for row in rows if not row.name.endswith(BEST)):
        of_name = {row.peer: row for row in rows if row.name == name}
        first = next(iter(of_name.values()))
        best = bests.get((name + BEST, first.peer))
        line = f"{name:34} {shown(first.value, best and best.value, first.unit):>20}"
        for peer in peers:
            row, best = of_name.get(peer), bests.get((name + BEST, peer))
            if row is None or row.peer_value is None or row.ratio is None:
                line += " " * 28
            else:
                line += f" {shown(row.peer_value, best and best.peer_value, row.unit):>20} {row.ratio:>6.2f}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def shown(value: float, best: float | None, unit: str) -> str:
    """A median with its unit, and the best in brackets."""
    if unit == "fraction":
        return f"{value:.0%}"
    digits = DIGITS[unit]
    brackets = "" if best is None else f" ({best:.{digits}f})"
    return f"{value:.{digits}f}{brackets} {unit}"


def write_json(rows: Iterable[Row], path: Path) -> None:
    """A list of objects with name, value, unit, peer, peer_value (both null without a peer) and ratio."""
    path.write_text(json.dumps([{**row._asdict(), "ratio": row.ratio} for row in rows], indent=1) + "\n")
