"""Numbers in the float storages, one at a time; :mod:`.vector` reads many."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from ...dtypes import float32_to_bfloat16
from ...ops import Array
from ..storage import widen
from .bits import bits_of, number_of


def narrow(value: Any, like: Array) -> Any:
    """A float32 scalar as an element of the array ``like``, to nearest, ties to even."""
    if like.dtype == np.uint16:
        return float32_to_bfloat16(value).item()
    return np.float16(value).view(np.int16) if like.dtype == np.int16 else value


@overload(narrow, strict=False)  # type: ignore[untyped-decorator]
def _(value: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return _narrow_to_bfloat16
    if like.dtype == types.int16:
        return lambda value, like: _to_half_bits(value)
    return lambda value, like: value


def _narrow_to_bfloat16(value, like):  # type: ignore[no-untyped-def]
    bits = np.uint32(bits_of(value))
    if value != value:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@intrinsic  # type: ignore[untyped-decorator]
def _to_half_bits(context: Any, value: Any) -> Any:
    """The bits of a float32 rounded to float16; too large becomes infinite."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


def widen_element(value: Any) -> Any:
    """An element of an array of one of the storages as float32."""
    return np.float32(widen(np.array([value]))[0])


@overload(widen_element, strict=False)  # type: ignore[untyped-decorator]
def _(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: number_of(np.int32(value) << np.int32(16))
    if value == types.int16:
        return lambda value: _from_half_bits(value)
    return lambda value: value


@intrinsic  # type: ignore[untyped-decorator]
def _from_half_bits(context: Any, bits: Any) -> Any:
    """The float32 of the float16 that an int16 holds the bits of."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate
