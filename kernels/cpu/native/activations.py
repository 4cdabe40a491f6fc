"""Quantised inputs of the quantised linear layers, made once a layer and step: symmetric, in groups of 32."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ...ops import GROUP_SIZE, Array
from .share import Share, inner, part

_SMALLEST = np.float32(1e-30)  #: groups without a larger number count as zeros
_ROUND = np.float32(12582912)  # 1.5 * 2^23: added to a small number, it leaves the nearest integer in the last bits
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
        stop = min(start + GROUP_SIZE, x.shape[1])
        _quantize_group(x[t, start:stop], codes[t, start : start + GROUP_SIZE], scales[t], sums[t], group, largest)


@inner
def _quantize_group(x: Array, codes: Array, scales: Array, sums: Array, group: int, largest: int) -> None:
    limit = np.float32(largest)
    magnitude, inverse = magnitude_of(x, limit)
    total = np.int32(0)
    for i in range(len(x)):
        code = rounded(x[i] * inverse)
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
        top = max(top, _bits(x[i]) & np.int32(0x7FFFFFFF))
    if top >= _INFINITE:
        return np.float32(np.nan), np.float32(0)
    magnitude = _number(top)
    if magnitude <= _SMALLEST:
        return np.float32(0), np.float32(0)
    return magnitude, limit / magnitude


@inner
def rounded(x: Any) -> Any:
    """A number of at most 2^22 as the nearest int32, ties to even."""
    return _bits(x + _ROUND) - np.int32(0x4B400000)


def _bits_in_python(value: Any) -> Any:
    return np.float32(value).view(np.int32)


def _number_in_python(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@intrinsic  # type: ignore[untyped-decorator]
def _bits_compiled(context: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _number_compiled(context: Any, bits: Any) -> Any:
    """The float32 that an int32 holds the bits of."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


_bits = _bits_in_python if numba.config.DISABLE_JIT else _bits_compiled
_number = _number_in_python if numba.config.DISABLE_JIT else _number_compiled
