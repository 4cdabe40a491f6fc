"""The bits of a float32 as an int32, and back."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def _bits_in_python(value: Any) -> Any:
    return np.float32(value).view(np.int32)


def _number_in_python(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@intrinsic  # type: ignore[untyped-decorator]
def _bits_compiled(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _number_compiled(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


#: ``bits_of(value)``: the bits of a float32. ``number_of(bits)``: the float32 that an int32 holds the bits of.
bits_of = _bits_in_python if numba.config.DISABLE_JIT else _bits_compiled
number_of = _number_in_python if numba.config.DISABLE_JIT else _number_compiled
