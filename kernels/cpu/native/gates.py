"""Gated activations of a row, as vector code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ...ops import Array
from . import vector
from .exponential import exp_of
from .vector import FLOAT, Builder, Value, constant, long

_LANES = 8
_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715  #: of the approximation of GELU by tanh


def _silu_in_python(out: Array, gate: Array, up: Array) -> None:
    with np.errstate(over="ignore"):
        out[:] = gate / (np.float32(1) + np.exp(-gate)) * up[: len(out)]


def _gelu_tanh_in_python(out: Array, gate: Array, up: Array) -> None:
    bent = np.float32(_SCALE) * (gate + np.float32(_CUBIC) * gate * gate * gate)
    out[:] = np.float32(0.5) * gate * (np.float32(1) + np.tanh(bent)) * up[: len(out)]


def _silu_of(b: Builder, x: Value) -> Value:
    """x / (1 + e^-x). Where e^-x is too large for a float32 it is e^88 here, and the quotient still next to nothing."""
    one = constant(FLOAT, x.type.count, 1.0)
    return b.fdiv(x, b.fadd(one, exp_of(b, b.fsub(constant(FLOAT, x.type.count, 0.0), x))))


def _gelu_tanh_of(b: Builder, x: Value) -> Value:
    """x / 2 (1 + tanh z) = x / (1 + e^-2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)."""

    def number(value: float) -> Value:
        return constant(FLOAT, x.type.count, value)

    cube = b.fmul(b.fmul(b.fmul(number(_CUBIC), x), x), x)
    exponent = b.fmul(number(-2 * _SCALE), b.fadd(x, cube))
    return b.fdiv(x, b.fadd(number(1.0), exp_of(b, exponent)))


def _gate(activation: Callable[[Builder, Value], Value]) -> Any:
    """The intrinsic ``f(out, gate, up)``: out[i] = activation(gate[i]) * up[i] for float32 rows, out as long as gate."""

    @intrinsic  # type: ignore[untyped-decorator]
    def compiled(context: Any, out: Any, gate: Any, up: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
            arrays = [
                context.make_array(kind)(context, builder, arg) for kind, arg in zip(signature.args, args, strict=True)
            ]
            count = builder.extract_value(arrays[0].shape, 0)
            whole = builder.and_(count, long(-_LANES))
            for lanes, start, stop in ((_LANES, long(0), whole), (1, whole, count)):
                with vector.count_up(builder, start, stop, lanes) as i:
                    x, factor = (vector.load(builder, array.data, FLOAT, i, lanes) for array in arrays[1:])
                    vector.store(builder, builder.fmul(activation(builder, x), factor), arrays[0].data, i)
            return context.get_dummy_value()

        return types.void(out, gate, up), generate

    return compiled


silu = _silu_in_python if numba.config.DISABLE_JIT else _gate(_silu_of)
gelu_tanh = _gelu_tanh_in_python if numba.config.DISABLE_JIT else _gate(_gelu_tanh_of)
