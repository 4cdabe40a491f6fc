"""Activations and other ops on single elements and rows."""

from __future__ import annotations

import math

import numpy as np

from ...ops import Array
from .gates import gelu_tanh, silu
from .share import Share, inner, part

_SILU, _GELU, _GELU_TANH = range(3)  #: places in ops.ACTIVATIONS


def gated_activation(out: Array, gate_up: Array, activation: int, share: Share) -> None:
    """out [T, I] = activation(gate) * up. The threads share columns, so that one token is enough for all of them."""
    first, last = part(out.shape[1], share)
    for t in range(len(out)):
        _activate(out[t, first:last], gate_up[t, first:last], gate_up[t, out.shape[1] + first :], activation)


@inner
def _activate(out: Array, gate: Array, up: Array, activation: int) -> None:
    if activation == _SILU:
        silu(out, gate, up)
    elif activation == _GELU:
        half, one = np.float32(0.5), np.float32(1)
        for i in range(len(out)):
            error = np.float32(math.erf(gate[i] * np.float32(math.sqrt(0.5))))
            out[i] = half * gate[i] * (one + error) * up[i]
    else:
        gelu_tanh(out, gate, up)


def add(out: Array, x: Array, y: Array, share: Share) -> None:
    """out = x + y, all [T, H]."""
    first, last = part(out.shape[1], share)
    for t in range(len(out)):
        for i in range(first, last):
            out[t, i] = x[t, i] + y[t, i]


def gather_rows(out: Array, x: Array, rows: Array, share: Share) -> None:
    """out [n, H] = x[rows]."""
    first, last = part(len(rows), share)
    for i in range(first, last):
        for j in range(x.shape[1]):
            out[i, j] = x[rows[i], j]
