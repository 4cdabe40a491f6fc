"""Small arrays on the stack of the running thread: kernels allocate nothing."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from ...ops import Array


def _floats_in_python(rows: int, columns: int) -> Array:
    return np.empty((rows, columns), np.float32)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _floats_compiled(context: Any, rows: Any, columns: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shape = rows.literal_value, columns.literal_value
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), shape[0] * shape[1]))
        array = context.make_array(signature.return_type)(context, builder)
        sizes = [context.get_constant(types.intp, size) for size in (*shape, 4 * shape[1], 4)]
        data = builder.bitcast(memory, ir.FloatType().as_pointer())
        populate_array(array, data, sizes[:2], sizes[2:], sizes[3], None)
        return array._getvalue()

    return types.Array(types.float32, 2, "C")(rows, columns), generate


#: ``floats(rows, columns)``: an uninitialised float32 array of two literal sizes, there until the calling function returns.
floats = _floats_in_python if numba.config.DISABLE_JIT else _floats_compiled
