"""Quantised inputs of the quantised linear layers, made once a layer and step: symmetric, in groups of 32."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ...ops import GROUP_SIZE, Array
from .bits import bits_of, number_of
from .share import Share, inner, part
from .vector import FLOAT, INT, across, constant, load, long, splat, store

_SMALLEST = np.float32(1e-30)  #: groups without a larger number count as zeros
_ROUND = np.float32(12582912)  # 1.5 * 2^23: added to a small number, it leaves the nearest integer in the last bits
_ROUND_BITS = 0x4B400000
_INFINITE = np.int32(0x7F800000)


def quantize(x: Array, codes: Array, scales: Array, sums: Array, largest: int, share: Share) -> None:
    """x [T, K] ~ codes [T, 32 G] * scales [T, G], |codes| <= ``largest``; sums [T, G] float32 of the codes of each group.

    A group that has a NaN or an infinite number has a scale of NaN.
    """
    num_groups = scales.shape[1]
    first, last = part(len(x) * num_groups, share)
    for task in range(first, last):
        t, group = task // num_groups, task % num_groups
        start = group * GROUP_SIZE
        if start + GROUP_SIZE <= x.shape[1]:
            whole, target = x[t, start : start + GROUP_SIZE], codes[t, start : start + GROUP_SIZE]
            limit = np.float32(largest)
            magnitude, inverse = _spread(group_top(whole), limit)
            sums[t, group] = np.float32(round_group(whole, inverse, target))
            scales[t, group] = magnitude / limit
        else:
            _quantize_rest(x[t, start:], codes[t, start : start + GROUP_SIZE], scales[t], sums[t], group, largest)


@inner
def _quantize_rest(x: Array, codes: Array, scales: Array, sums: Array, group: int, largest: int) -> None:
    limit = np.float32(largest)
    magnitude, inverse = magnitude_of(x, limit)
    total = np.int32(0)
    for i in range(len(x)):
        code = code_of(x[i], inverse)
        codes[i] = code
        total += code
    for i in range(len(x), len(codes)):
        codes[i] = 0
    scales[group] = magnitude / limit
    sums[group] = np.float32(total)


@inner
def magnitude_of(x: Array, limit: Any) -> tuple[Any, Any]:
    """The largest magnitude of x [n], NaN where one is not finite, and by what to multiply x to spread it over +-``limit``."""
    # Bits of numbers without sign are in the order of the numbers, and maxima of integers need no order to be vector code.
    top = np.int32(0)
    for i in range(len(x)):
        top = max(top, bits_of(x[i]) & np.int32(0x7FFFFFFF))
    return _spread(top, limit)


@inner
def _spread(top: Any, limit: Any) -> tuple[Any, Any]:
    """As :func:`magnitude_of`, for the bits of the largest magnitude."""
    if top >= _INFINITE:
        return np.float32(np.nan), np.float32(0)
    magnitude = number_of(top)
    if magnitude <= _SMALLEST:
        return np.float32(0), np.float32(0)
    return magnitude, limit / magnitude


@inner
def code_of(x: Any, inverse: Any) -> Any:
    """x * inverse, of at most 2^22, as the nearest int32, ties to even; 0 where ``inverse`` is, even if x is NaN or infinite."""
    return bits_of(x * inverse + _ROUND) - np.int32(_ROUND_BITS) if inverse > 0 else np.int32(0)


# ---- a whole group, as vector code -------------------------------------------------------------------------------------

_LANES = 8


def _group_top_in_python(x: Array) -> Any:
    return (np.ascontiguousarray(x).view(np.int32) & np.int32(0x7FFFFFFF)).max()


def _round_group_in_python(x: Array, inverse: Any, codes: Array) -> Any:
    codes[:] = np.rint(x * inverse) if inverse else 0
    return codes.sum(dtype=np.int32)


@intrinsic  # type: ignore[untyped-decorator]
def _group_top_compiled(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        wide = ir.VectorType(INT, _LANES)
        top = constant(INT, _LANES, 0)
        for start in range(0, GROUP_SIZE, _LANES):
            bits = builder.bitcast(load(builder, data, FLOAT, long(start), _LANES), wide)
            bits = builder.and_(bits, constant(INT, _LANES, 0x7FFFFFFF))
            top = builder.select(builder.icmp_signed(">", bits, top), bits, top)
        return across(builder, "smax", top)

    return types.int32(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def _round_group_compiled(context: Any, x: Any, inverse: Any, codes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        target = context.make_array(signature.args[2])(context, builder, args[2]).data
        wide, narrow = ir.VectorType(INT, _LANES), ir.VectorType(ir.IntType(codes.dtype.bitwidth), _LANES)
        factor = splat(builder, args[1], _LANES)
        total = constant(INT, _LANES, 0)
        for start in range(0, GROUP_SIZE, _LANES):
            scaled = builder.fmul(load(builder, data, FLOAT, long(start), _LANES), factor)
            shifted = builder.bitcast(builder.fadd(scaled, constant(FLOAT, _LANES, float(_ROUND))), wide)
            rounded = builder.sub(shifted, constant(INT, _LANES, _ROUND_BITS))
            total = builder.add(total, rounded)
            store(builder, builder.trunc(rounded, narrow), target, long(start))
        return across(builder, "add", total)

    return types.int32(x, types.float32, codes), generate


#: ``group_top(x)``: the bits of the largest magnitude of x [32] float32.
#: ``round_group(x, inverse, codes)``: codes [32] = x * inverse, to nearest; returns their sum.
group_top = _group_top_in_python if numba.config.DISABLE_JIT else _group_top_compiled
round_group = _round_group_in_python if numba.config.DISABLE_JIT else _round_group_compiled
