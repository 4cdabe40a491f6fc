"""Linear layers of many tokens by cuBLAS: x is rounded to the dtype of weights that are floats.

Quantised weights become float16 first, some rows at a time, and x is rounded to that, too. To write and read them is little
beside the arithmetic, which then need not turn codes into numbers again for every few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy import float32

from ..dtypes import STORAGE
from ..ops import PackedWeight
from .embedding import VALUES
from .intrinsics import pack_bfloat16, pack_half, store16
from .linear_operands import EIGHT, KINDS
from .rows import choose, for_each_access
from .target import THREADS, address, blocks_for, cuda, kernel, launch, scratch
from .weights import STEP, TILE, arrays_of

Array = Any

#: Of cuBLAS and the CUDA runtime: operations, types of elements, of arithmetic, choice of an algorithm.
PLAIN, TRANSPOSED = 0, 1
ELEMENTS = {"float32": 0, "float16": 2, "bfloat16": 14}
FLOAT32_ARITHMETIC, ANY_ALGORITHM = 68, -1
MOST_WIDENED = 1 << 26  #: weights that are float16 at a time


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


def _widen_kernel(values: Any) -> Any:
    @kernel
    def widen_kernel(out: Array, codes: Array, scales: Array, minima: Array, first: Any, padded: Any) -> None:
        # out: rows of ``padded`` float16, seen as float32, of which the first is row ``first`` of the weight
        row, eight = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if eight * EIGHT < padded:
            (a, b, c, d), (e, f, g, h) = values(codes, scales, minima, first + row, eight)
            words = pack_half(a, b), pack_half(c, d), pack_half(e, f), pack_half(g, h)
            store16(out, (row * padded + eight * EIGHT) // 2, words)

    return widen_kernel


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
widen_kernels = {kind: _widen_kernel(VALUES[kind]) for kind in KINDS if kind not in STORAGE}


def linear_blas(out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias. Not while a stream is captured."""
    (tokens, outputs), inputs = out.shape, x.shape[1]
    padded = blocks_for(inputs, STEP) * STEP
    kind = weight.kind if weight.kind in STORAGE else "float16"
    unit, width, source = 1.0, inputs, x
    if kind != "float32":
        unit, width, source = KINDS[kind].unit, padded, scratch("narrow", tokens * padded // 2)
        grid = tokens, blocks_for(inputs, EIGHT * THREADS)
        launch(choose(narrow_kernels[kind], x), grid, THREADS, source, x, padded)
    cublas, handle = _library()
    # cuBLAS counts columns first: to it a row-major array is its own transpose, and out.T = weight @ x.T.
    factors, element = np.array([unit, 0], np.float32), ELEMENTS[kind]
    for rows, first, count in _rows(weight, padded):
        cublas.gemmEx(
            *(handle, TRANSPOSED, PLAIN, count, tokens, inputs),
            *(factors.ctypes.data, rows, element, padded, address(source), element, width),
            *(
                factors.ctypes.data + factors.itemsize,
                address(out) + first * out.itemsize,
                ELEMENTS["float32"],
                outputs,
            ),
            *(FLOAT32_ARITHMETIC, ANY_ALGORITHM),
        )
    if bias is not None:
        row = bias.reshape(1, -1)
        grid = tokens, blocks_for(outputs, 4 * THREADS)
        launch(choose(add_bias_kernels, out, row), grid, THREADS, out, row)


def _rows(weight: PackedWeight, padded: int) -> Iterator[tuple[int, int, int]]:
    """The address of rows [n, padded] of floats, the first of them, and n: all as they are, or some made float16."""
    outputs, _ = weight.shape
    if weight.kind in STORAGE:
        yield address(weight.arrays[0]), 0, outputs
        return
    most = max(MOST_WIDENED // padded // TILE, 1) * TILE  # so that results begin where cuBLAS likes it
    widened = scratch("widened", min(most, outputs) * padded // 2)
    for first in range(0, outputs, most):
        count = min(most, outputs - first)
        grid = count, blocks_for(padded, EIGHT * THREADS)
        launch(widen_kernels[weight.kind], grid, THREADS, widened, *arrays_of(weight), first, padded)
        yield address(widened), first, count


def _library() -> tuple[Any, Any]:
    """CuPy's binding of cuBLAS, and its handle for the current GPU, for which CuPy sets the current stream."""
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    return cublas, device.get_cublas_handle()
