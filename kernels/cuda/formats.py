"""Between the storages (float32, float16, bfloat16 as uint16 bits) and float32, inside kernels.

``widen(element)`` takes an element as it is stored and gives float32, exactly. ``narrow(array, x)`` takes float32 and gives an
element of the array's dtype, to nearest with ties to even; what is too large becomes infinite, NaN stays NaN.

Compiled, each is a few LLVM instructions, chosen by dtype. float16 goes through LLVM's ``half`` and not through Numba's own
float16, which needs one compiler more. In the simulator NumPy does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from ..dtypes import float32_to_bfloat16
from .target import SIMULATED

Array = Any

HALF, SINGLE, BITS16, BITS32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)


def _same(builder: Any, value: Any) -> Any:
    return value


def _half_to_single(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, HALF), SINGLE)


def _single_to_half(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, HALF), BITS16)


def _bfloat16_to_single(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, BITS32), BITS32(16)), SINGLE)


def _single_to_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, BITS32)
    odd = builder.and_(builder.lshr(bits, BITS32(16)), BITS32(1))
    rounded = builder.add(bits, builder.add(BITS32(0x7FFF), odd))
    quiet_nan = builder.or_(bits, BITS32(0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(is_nan, quiet_nan, rounded), BITS32(16)), BITS16)


#: By Numba's name of the element type: what emits the conversion, given an IR builder and the value.
WIDENING: dict[str, Callable[[Any, Any], Any]] = {
    "float32": _same,
    "float16": _half_to_single,
    "uint16": _bfloat16_to_single,
}
NARROWING: dict[str, Callable[[Any, Any], Any]] = {
    "float32": _same,
    "float16": _single_to_half,
    "uint16": _single_to_bfloat16,
}


def _compiled() -> tuple[Any, Any]:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    def widen(typingctx: Any, element: Any) -> Any:
        emit = WIDENING[str(element)]
        return types.float32(element), lambda context, builder, sig, args: emit(builder, args[0])

    def narrow(typingctx: Any, array: Any, x: Any) -> Any:
        emit = NARROWING[str(array.dtype)]
        return array.dtype(array, types.float32), lambda context, builder, sig, args: emit(builder, args[1])

    return intrinsic(widen), intrinsic(narrow)


def _simulated_widen(element: Any) -> Any:
    if isinstance(element, np.uint16):
        return np.uint32(int(element) << 16).view(np.float32)
    return np.float32(element)


def _simulated_narrow(array: Array, x: Any) -> Any:
    if array.dtype == np.uint16:
        return float32_to_bfloat16(x).item()
    return array.dtype.type(x)


widen, narrow = (_simulated_widen, _simulated_narrow) if SIMULATED else _compiled()
