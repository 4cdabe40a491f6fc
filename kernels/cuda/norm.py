"""Root mean square norm and layer norm: a thread block a row, of as many threads as the row's length asks for.

So the order in which a row is summed depends on its length alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import float32

from .rows import choose, for_each_access
from .target import SIMULATED, WARP, blocks_for, cuda, device_function, kernel, launch
from .warps import warp_sum

Array = Any

MOST_WARPS = 2 if SIMULATED else 32  #: of a block


@device_function
def block_sum(value: Any) -> Any:
    """The sum of ``value`` over the threads of a block, whole warps of them, in every one."""
    partial = cuda.shared.array(MOST_WARPS, float32)
    value = warp_sum(value)
    cuda.syncthreads()  # an earlier block_sum may still be reading
    if cuda.threadIdx.x % WARP == 0:
        partial[cuda.threadIdx.x // WARP] = value
    cuda.syncthreads()
    total = float32(0)
    for warp in range(cuda.blockDim.x // WARP):
        total += partial[warp]
    return total


def _normalise(load: Any, store: Any) -> Any:
    @device_function
    def normalise(out: Array, x: Array, weight: Array, eps: Any, squares: Any) -> None:
        """The block's row of ``x`` divided by the root of its mean square, times weights.

        ``squares`` is the sum over those elements that the thread has.
        """
        row, size = cuda.blockIdx.x, x.shape[1]
        inverse = float32(1) / math.sqrt(block_sum(squares) / float32(size) + eps)
        for i in range(4 * cuda.threadIdx.x, size, 4 * cuda.blockDim.x):
            a, b, c, d = load(x, row, i)
            wa, wb, wc, wd = load(weight, 0, i)
            store(out, row, i, (a * inverse * wa, b * inverse * wb, c * inverse * wc, d * inverse * wd))

    return normalise


def _rms_norm_kernel(load: Any, store: Any) -> Any:
    normalise = _normalise(load, store)

    @kernel
    def rms_norm_kernel(out: Array, x: Array, weight: Array, eps: Any) -> None:
        row, size = cuda.blockIdx.x, x.shape[1]
        first, step = 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
        squares = float32(0)
        for i in range(first, size, step):
            a, b, c, d = load(x, row, i)
            squares += (a * a + b * b) + (c * c + d * d)
        normalise(out, x, weight, eps, squares)

    return rms_norm_kernel


def _add_rms_norm_kernel(load: Any, store: Any) -> Any:
    normalise = _normalise(load, store)

    @kernel
    def add_rms_norm_kernel(out: Array, h: Array, x: Array, weight: Array, eps: Any) -> None:
        row, size = cuda.blockIdx.x, x.shape[1]
        first, step = 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
        squares = float32(0)
        for i in range(first, size, step):
            a, b, c, d = load(h, row, i)
            xa, xb, xc, xd = load(x, row, i)
            a, b, c, d = a + xa, b + xb, c + xc, d + xd
            store(h, row, i, (a, b, c, d))  # each element has one thread, so what it adds it may read again
            squares += (a * a + b * b) + (c * c + d * d)
        normalise(out, h, weight, eps, squares)

    return add_rms_norm_kernel


def _layer_norm_kernel(load: Any, store: Any) -> Any:
    @kernel
    def layer_norm_kernel(out: Array, x: Array, weight: Array, bias: Array, eps: Any) -> None:
        row, size = cuda.blockIdx.x, x.shape[1]
        first, step = 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
        total = float32(0)
        for i in range(first, size, step):
            a, b, c, d = load(x, row, i)
            total += (a + b) + (c + d)
        mean = block_sum(total) / float32(size)
        squares = float32(0)
        for i in range(first, size, step):
            a, b, c, d = load(x, row, i)
            squares += (a - mean) * (a - mean)
            if i + 1 < size:  # a row may end within the four
                squares += (b - mean) * (b - mean)
            if i + 2 < size:
                squares += (c - mean) * (c - mean)
            if i + 3 < size:
                squares += (d - mean) * (d - mean)
        inverse = float32(1) / math.sqrt(block_sum(squares) / float32(size) + eps)
        for i in range(first, size, step):
            a, b, c, d = load(x, row, i)
            a, b, c, d = (a - mean) * inverse, (b - mean) * inverse, (c - mean) * inverse, (d - mean) * inverse
            wa, wb, wc, wd = load(weight, 0, i)
            ba, bb, bc, bd = load(bias, 0, i)
            store(out, row, i, (a * wa + ba, b * wb + bb, c * wc + bc, d * wd + bd))

    return layer_norm_kernel


rms_norm_kernels = for_each_access(_rms_norm_kernel)
add_rms_norm_kernels = for_each_access(_add_rms_norm_kernel)
layer_norm_kernels = for_each_access(_layer_norm_kernel)


def rms_norm(out: Array, x: Array, weight: Array, eps: float) -> None:
    """See :meth:`kernels.ops.Ops.rms_norm`."""
    _launch(rms_norm_kernels, (out, x, weight.reshape(1, -1)), eps)


def add_rms_norm(out: Array, h: Array, x: Array, weight: Array, eps: float) -> None:
    """See :meth:`kernels.ops.Ops.add_rms_norm`."""
    _launch(add_rms_norm_kernels, (out, h, x, weight.reshape(1, -1)), eps)


def layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
    """See :meth:`kernels.ops.Ops.layer_norm`."""
    _launch(layer_norm_kernels, (out, x, weight.reshape(1, -1), bias.reshape(1, -1)), eps)


def _launch(kernels: dict[str, Any], arrays: tuple[Array, ...], eps: float) -> None:
    """A block a row, with a thread for four elements of it as far as a block has threads."""
    num_rows, size = arrays[0].shape
    threads = WARP * min(blocks_for(size, 4 * WARP), MOST_WARPS)
    launch(choose(kernels, *arrays), (num_rows,), threads, *arrays, np.float32(eps))
