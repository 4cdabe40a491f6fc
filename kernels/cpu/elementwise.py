"""Activations and other ops on single elements and rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange

from ..ops import ACTIVATIONS, Array
from .jit import Kernel, inner

_SERIAL = 1 << 12  #: elements below which starting the threads takes longer than the work
_SILU, _GELU, _GELU_TANH = range(3)  #: places in ACTIVATIONS


def gated_activation(out: Array, gate_up: Array, activation: str) -> None:
    """out [T, I] = activation(gate) * up (Shazeer 2020), gate and up the two halves of ``gate_up`` [T, 2I]."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not allowed; allowed: {', '.join(ACTIVATIONS)}")
    _kernel(out, gate_up, ACTIVATIONS.index(activation))


def add(out: Array, x: Array, y: Array) -> None:
    """out = x + y. Plain NumPy: it is bound by memory."""
    np.add(x, y, out=out)


def gather_rows(out: Array, x: Array, rows: Array) -> None:
    """out [n, H] = x[rows]. Plain NumPy: it only copies."""
    out[:] = x[rows]


def _gated_activation(out: Array, gate_up: Array, activation: int) -> None:
    if out.size < _SERIAL:
        for t in range(len(out)):
            _activate_row(out[t], gate_up[t], activation)
    else:
        for t in prange(len(out)):
            _activate_row(out[t], gate_up[t], activation)


@inner
def _activate_row(out: Array, gate_up: Array, activation: int) -> None:
    for i in range(len(out)):
        out[i] = _activate(gate_up[i], activation) * gate_up[len(out) + i]


@inner
def _activate(x: Any, activation: int) -> Any:
    half, one = np.float32(0.5), np.float32(1)
    if activation == _SILU:
        return x / (one + np.exp(-x))  # exp may become infinite, and then the quotient is 0, as it should be
    if activation == _GELU:
        return half * x * (one + np.float32(math.erf(x * np.float32(math.sqrt(0.5)))))
    cubic = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return half * x * (one + np.tanh(cubic))


_kernel = Kernel(_gated_activation, "float32[:, ::1], float32[:, ::1], int64", parallel=True)
