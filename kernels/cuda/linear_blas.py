"""Linear layers of many tokens by cuBLAS, for weights that are floats: what is rounded to the weight's dtype is x."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32

from .intrinsics import pack_bfloat16, pack_half, store16
from .linear_operands import KINDS
from .rows import choose, for_each_access
from .target import THREADS, address, blocks_for, cuda, kernel, launch, scratch

Array = Any

#: Of cuBLAS and the CUDA runtime: operations, types of elements, of arithmetic, choice of an algorithm.
PLAIN, TRANSPOSED = 0, 1
ELEMENTS = {"float32": 0, "float16": 2, "bfloat16": 14}
FLOAT32_ARITHMETIC, ANY_ALGORITHM = 68, -1


def _narrow_kernel(pack: Any, unit: Any, load: Any) -> Any:
    inverse = float32(1 / unit)

    @kernel
    def narrow_kernel(out: Array, x: Array, padded: Any) -> None:
        # out: rows of ``padded`` 16-bit floats, seen as float32
        row, i = cuda.blockIdx.x, 8 * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if i < x.shape[1]:
            a, b, c, d = load(x, row, i)
            e, f, g, h = a, a, a, a  # behind the end of the row anything will do
            if i + 4 < x.shape[1]:
                e, f, g, h = load(x, row, i + 4)
            first = pack(a * inverse, b * inverse), pack(c * inverse, d * inverse)
            store16(
                out, (row * padded + i) // 2, (*first, pack(e * inverse, f * inverse), pack(g * inverse, h * inverse))
            )

    return narrow_kernel


def _add_bias_kernel(load: Any, store: Any) -> Any:
    @kernel
    def add_bias_kernel(out: Array, bias: Array) -> None:
        row, i = cuda.blockIdx.x, 4 * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if i < out.shape[1]:
            a, b, c, d = load(out, row, i)
            e, f, g, h = load(bias, 0, i)
            store(out, row, i, (a + e, b + f, c + g, d + h))

    return add_bias_kernel


def _narrow_kernels(kind: str, pack: Any) -> Any:
    return for_each_access(lambda load, store: _narrow_kernel(pack, KINDS[kind].unit, load))


narrow_kernels = {
    kind: _narrow_kernels(kind, pack) for kind, pack in (("float16", pack_half), ("bfloat16", pack_bfloat16))
}
add_bias_kernels = for_each_access(_add_bias_kernel)


def linear_blas(out: Array, x: Array, weight: Array, kind: str, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias, ``weight`` [N, Kp] of a float kind, Kp >= K. Not while a stream is captured."""
    (tokens, outputs), inputs, padded = out.shape, x.shape[1], weight.shape[1]
    unit, width, source = 1.0, inputs, x
    if kind != "float32":
        unit, width, source = KINDS[kind].unit, padded, scratch("narrow", tokens * padded // 2)
        grid = tokens, blocks_for(inputs, 8 * THREADS)
        launch(choose(narrow_kernels[kind], x), grid, THREADS, source, x, padded)
    cublas, handle = _library()
    # cuBLAS counts columns first: to it a row-major array is its own transpose, and out.T = weight @ x.T.
    factors, element = np.array([unit, 0], np.float32), ELEMENTS[kind]
    cublas.gemmEx(
        *(handle, TRANSPOSED, PLAIN, outputs, tokens, inputs),
        *(factors.ctypes.data, address(weight), element, padded, address(source), element, width),
        *(factors.ctypes.data + factors.itemsize, address(out), ELEMENTS["float32"], outputs),
        *(FLOAT32_ARITHMETIC, ANY_ALGORITHM),
    )
    if bias is not None:
        row = bias.reshape(1, -1)
        grid = tokens, blocks_for(outputs, 4 * THREADS)
        launch(choose(add_bias_kernels, out, row), grid, THREADS, out, row)


def _library() -> tuple[Any, Any]:
    """CuPy's binding of cuBLAS, and its handle for the current GPU, for which CuPy sets the current stream."""
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    return cublas, device.get_cublas_handle()
