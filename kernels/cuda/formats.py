"""Between the storages (float32, float16, bfloat16 as uint16 bits) and float32, inside kernels.

``widen`` takes an element as it is stored and gives float32, exactly. ``narrow`` takes float32 and gives an element of an
array's dtype, to nearest with ties to even; what is too large becomes infinite. Compiled, both are a few instructions chosen
by dtype, and float16 goes through LLVM's ``half``, not through Numba's float16 support, which needs one more compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import float32_to_bfloat16
from .target import SIMULATED

Array = Any


def _simulated_widen(value: Any) -> Any:
    if isinstance(value, np.uint16):
        return np.uint32(int(value) << 16).view(np.float32)
    return np.float32(value)


def _simulated_narrow(array: Array, value: Any) -> Any:
    if array.dtype == np.uint16:
        return float32_to_bfloat16(value).item()
    return array.dtype.type(value)


def _compiled() -> tuple[Any, Any]:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    half, single, bits16, bits32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)

    def bfloat16_to_single(builder: Any, bits: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(bits, bits32), bits32(16)), single)

    def single_to_bfloat16(builder: Any, value: Any) -> Any:
        bits = builder.bitcast(value, bits32)
        odd = builder.and_(builder.lshr(bits, bits32(16)), bits32(1))
        rounded = builder.add(bits, builder.add(bits32(0x7FFF), odd))
        quiet_nan = builder.or_(bits, bits32(0x400000))
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.lshr(builder.select(is_nan, quiet_nan, rounded), bits32(16)), bits16)

    widening = {
        "float32": lambda builder, value: value,
        "float16": lambda builder, value: builder.fpext(builder.bitcast(value, half), single),
        "uint16": bfloat16_to_single,
    }
    narrowing = {
        "float32": lambda builder, value: value,
        "float16": lambda builder, value: builder.bitcast(builder.fptrunc(value, half), bits16),
        "uint16": single_to_bfloat16,
    }

    def widen(typingctx: Any, value: Any) -> Any:
        convert = widening[str(value)]
        return types.float32(value), lambda context, builder, sig, args: convert(builder, args[0])

    def narrow(typingctx: Any, array: Any, value: Any) -> Any:
        convert = narrowing[str(array.dtype)]
        return array.dtype(array, types.float32), lambda context, builder, sig, args: convert(builder, args[1])

    return intrinsic(widen), intrinsic(narrow)


widen, narrow = (_simulated_widen, _simulated_narrow) if SIMULATED else _compiled()
