"""Activations and other ops on single elements and rows."""

from __future__ import annotations

import math

import numpy as np

from ..ops import ACTIVATIONS, Array

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gated_activation(out: Array, gate_up: Array, activation: str) -> None:
    """out [T, I] = activation(gate) * up (Shazeer 2020), gate and up the two halves of ``gate_up`` [T, 2I]."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    if activation == "silu":
        # exp of a negative number only, so that nothing overflows.
        decay = np.exp(-np.abs(gate))
        activated = gate * np.where(gate >= 0, 1, decay) / (1 + decay)
    elif activation == "gelu":
        activated = gate * 0.5 * (1 + _erf(gate / math.sqrt(2)))
    elif activation == "gelu_tanh":
        activated = gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        raise ValueError(f"activation={activation!r} is not allowed; allowed: {', '.join(ACTIVATIONS)}")
    out[:] = activated * up


def add(out: Array, x: Array, y: Array) -> None:
    """out = x + y."""
    np.add(x, y, out=out)


def gather_rows(out: Array, x: Array, rows: Array) -> None:
    """out [n, H] = x[rows]."""
    out[:] = x[rows]
