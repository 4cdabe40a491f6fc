"""Linear layers and the embedding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange
from numba.core import types
from numba.extending import overload

from ..ops import Array, PackedWeight
from .jit import INPUT_VECTOR, Kernel, inner
from .microkernel import multiply
from .quantized import PANEL, RECORD_DTYPE, multiply_quantized
from .weights import select_rows

_SERIAL = 1 << 17  #: products below which starting the threads takes longer than the work
_NO_BIAS = np.zeros(0, np.float32)


def embed(out: Array, weight: PackedWeight, token_ids: Array) -> None:
    """out [T, H] = rows ``token_ids`` of ``weight`` (V, H). Plain NumPy: it only copies."""
    out[:] = select_rows(weight, token_ids)


def linear(out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias."""
    (panels,) = weight.arrays
    _kernel(panels.dtype)(out, x, panels, _NO_BIAS if bias is None else bias)


@functools.cache
def _kernel(dtype: np.dtype) -> Kernel:
    return Kernel(_linear, f"float32[:, ::1], float32[:, ::1], {dtype}[:, :, ::1], {INPUT_VECTOR}", parallel=True)


def _linear(out: Array, x: Array, panels: Array, bias: Array) -> None:
    num_panels = len(panels)
    if out.shape[0] * out.shape[1] * x.shape[1] < _SERIAL:
        for p in range(num_panels):
            _linear_panel(out, x, panels, bias, p)
    else:
        for p in prange(num_panels):
            # prange counts in unsigned integers, for which all would be compiled once more.
            _linear_panel(out, x, panels, bias, np.int64(p))


@inner
def _linear_panel(out: Array, x: Array, panels: Array, bias: Array, p: int | np.int64) -> None:
    """The outputs of panel ``p``, for all tokens."""
    num_tokens, num_outputs = out.shape
    first = p * PANEL
    last = min(first + PANEL, num_outputs)
    if last - first == PANEL:
        _multiply_rows(x, panels[p], out[:, first:last])
    else:
        # A slice, as the one above is, and not an array of another memory layout to compile for.
        whole = np.empty((num_tokens, PANEL), np.float32)[:, :PANEL]
        _multiply_rows(x, panels[p], whole)
        for t in range(num_tokens):
            for n in range(first, last):
                out[t, n] = whole[t, n - first]
    if len(bias) > 0:
        for t in range(num_tokens):
            for n in range(first, last):
                out[t, n] += bias[n]


@inner
def _multiply_rows(x: Array, panel: Array, out: Array) -> None:
    """out [T, 16] = x [T, K] @ panel, in steps of as many rows as fill the registers, then of fewer."""
    num_tokens, t = len(x), 0
    while t + 6 <= num_tokens:
        _multiply_panel(6, x[t:], panel, out[t:])
        t += 6
    while t + 3 <= num_tokens:
        _multiply_panel(3, x[t:], panel, out[t:])
        t += 3
    while t < num_tokens:
        _multiply_panel(1, x[t:], panel, out[t:])
        t += 1


def _multiply_panel(rows: int, x: Array, panel: Array, out: Array) -> None:
    """One microkernel, the one for the panel's kind."""
    if panel.dtype in RECORD_DTYPE.values():
        multiply_quantized(rows, x, panel, out)
    else:
        multiply(rows, 16, False, x, panel, out)


@overload(_multiply_panel, prefer_literal=True, strict=False, inline="always")  # type: ignore[untyped-decorator]
def _(rows: Any, x: Any, panel: Any, out: Any) -> Any:
    if panel.dtype in (types.int8, types.uint8):
        return lambda rows, x, panel, out: multiply_quantized(rows, x, panel, out)
    return lambda rows, x, panel, out: multiply(rows, 16, False, x, panel, out)
