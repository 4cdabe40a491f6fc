"""Activations and other ops on single elements and rows."""

from __future__ import annotations

from ..ops import ACTIVATIONS, Array
from .kernel import Kernel
from .team import call

_MATRIX = "float32[:, ::1]"
_UNIT = 4096  #: elements that are worth a piece of their own
_GATED_ACTIVATION = Kernel("elementwise:gated_activation", f"{_MATRIX}, {_MATRIX}, int64")
_ADD = Kernel("elementwise:add", f"{_MATRIX}, {_MATRIX}, {_MATRIX}")
_GATHER_ROWS = Kernel("elementwise:gather_rows", f"{_MATRIX}, {_MATRIX}, int32[::1]")


def gated_activation(out: Array, gate_up: Array, activation: str) -> None:
    """out [T, I] = activation(gate) * up (Shazeer 2020), gate and up the two halves of ``gate_up`` [T, 2I]."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not allowed; allowed: {', '.join(ACTIVATIONS)}")
    call(_GATED_ACTIVATION, out, gate_up, ACTIVATIONS.index(activation), units=out.size // _UNIT)


def add(out: Array, x: Array, y: Array) -> None:
    """out = x + y, all [T, H]."""
    call(_ADD, out, x, y, units=out.size // _UNIT)


def gather_rows(out: Array, x: Array, rows: Array) -> None:
    """out [n, H] = x[rows]."""
    call(_GATHER_ROWS, out, x, rows, units=out.size // _UNIT)
