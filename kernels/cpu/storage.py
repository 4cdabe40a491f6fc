"""How Numba sees the float storages: by a dtype of its own for each, since it refuses float16 arrays on the CPU.

    float32     float32
    bfloat16    uint16, its bits, as everywhere in this project
    float16     int16, its bits

So the dtype alone tells a compiled function which storage it reads, and each is compiled only when it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from ..dtypes import float32_to_bfloat16, to_float32
from ..ops import Array

#: A storage's dtype in Numba's signatures, by the NumPy dtype of the array.
NUMBA_STORAGE = {np.dtype(np.float32): "float32", np.dtype(np.uint16): "uint16", np.dtype(np.float16): "int16"}


def as_numba(array: Array) -> Array:
    """The array as Numba is to see it: itself, or float16 as int16."""
    return array.view(np.int16) if array.dtype == np.float16 else array


def widen(stored: Array) -> Array:
    """An array that Numba sees (see :func:`as_numba`) as float32."""
    return to_float32(stored.view(np.float16) if stored.dtype == np.int16 else stored)


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
    bits = _bits(value)
    if value != value:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@intrinsic  # type: ignore[untyped-decorator]
def _bits(context: Any, value: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _to_half_bits(context: Any, value: Any) -> Any:
    """The bits of a float32 rounded to float16; too large becomes infinite."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate
