"""Root mean square norm and layer norm: a thread block a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import float32

from .target import THREADS, WARP, cuda, device_function, kernel, launch

Array = Any

ALL_LANES = 0xFFFFFFFF
NUM_WARPS = THREADS // WARP


@device_function
def warp_sum(value: Any) -> Any:
    """The sum of ``value`` over the 32 threads of a warp, in every one of them: halves are exchanged five times."""
    distance = WARP // 2
    while distance > 0:
        value += cuda.shfl_xor_sync(ALL_LANES, value, distance)
        distance //= 2
    return value


@device_function
def block_sum(value: Any) -> Any:
    """The sum of ``value`` over the THREADS threads of a block, in every one of them."""
    partial = cuda.shared.array(NUM_WARPS, float32)
    value = warp_sum(value)
    cuda.syncthreads()  # an earlier block_sum may still be reading
    if cuda.threadIdx.x % WARP == 0:
        partial[cuda.threadIdx.x // WARP] = value
    cuda.syncthreads()
    total = float32(0)
    for warp in range(NUM_WARPS):
        total += partial[warp]
    return total


@kernel
def rms_norm_kernel(out: Array, x: Array, weight: Array, eps: Any) -> None:
    row, size = cuda.blockIdx.x, x.shape[1]
    squares = float32(0)
    for i in range(cuda.threadIdx.x, size, THREADS):
        squares += x[row, i] * x[row, i]
    inverse = float32(1) / math.sqrt(block_sum(squares) / float32(size) + eps)
    for i in range(cuda.threadIdx.x, size, THREADS):
        out[row, i] = x[row, i] * inverse * weight[i]


@kernel
def add_rms_norm_kernel(out: Array, h: Array, x: Array, weight: Array, eps: Any) -> None:
    row, size = cuda.blockIdx.x, x.shape[1]
    squares = float32(0)
    for i in range(cuda.threadIdx.x, size, THREADS):
        h[row, i] += x[row, i]  # each element has one thread, so what it adds it may read again
        squares += h[row, i] * h[row, i]
    inverse = float32(1) / math.sqrt(block_sum(squares) / float32(size) + eps)
    for i in range(cuda.threadIdx.x, size, THREADS):
        out[row, i] = h[row, i] * inverse * weight[i]


@kernel
def layer_norm_kernel(out: Array, x: Array, weight: Array, bias: Array, eps: Any) -> None:
    row, size = cuda.blockIdx.x, x.shape[1]
    total = float32(0)
    for i in range(cuda.threadIdx.x, size, THREADS):
        total += x[row, i]
    mean = block_sum(total) / float32(size)
    squares = float32(0)
    for i in range(cuda.threadIdx.x, size, THREADS):
        squares += (x[row, i] - mean) * (x[row, i] - mean)
    inverse = float32(1) / math.sqrt(block_sum(squares) / float32(size) + eps)
    for i in range(cuda.threadIdx.x, size, THREADS):
        out[row, i] = (x[row, i] - mean) * inverse * weight[i] + bias[i]


def rms_norm(out: Array, x: Array, weight: Array, eps: float) -> None:
    """See :meth:`kernels.ops.Ops.rms_norm`."""
    launch(rms_norm_kernel, (x.shape[0],), THREADS, out, x, weight, np.float32(eps))


def add_rms_norm(out: Array, h: Array, x: Array, weight: Array, eps: float) -> None:
    """See :meth:`kernels.ops.Ops.add_rms_norm`."""
    launch(add_rms_norm_kernel, (x.shape[0],), THREADS, out, h, x, weight, np.float32(eps))


def layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
    """See :meth:`kernels.ops.Ops.layer_norm`."""
    launch(layer_norm_kernel, (x.shape[0],), THREADS, out, x, weight, bias, np.float32(eps))
