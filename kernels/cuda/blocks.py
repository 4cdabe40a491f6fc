"""Copies of whole blocks, within a pool and between pools, in all layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .target import SIMULATED, THREADS, blocks_for, cuda, device_function, kernel, launch, to_device, to_host

Array = Any

MAX_GRID_Z = 65535


@device_function
def copy_block(to: Array, to_block: Any, source: Array, source_block: Any) -> None:
    """One layer's block of a pool [L, num_blocks, elements] to another, spread over threads x and blocks z of the launch."""
    layer = cuda.blockIdx.y
    first, step = cuda.blockIdx.z * THREADS + cuda.threadIdx.x, cuda.gridDim.z * THREADS
    for i in range(first, to.shape[2], step):
        to[layer, to_block, i] = source[layer, source_block, i]


@kernel
def copy_blocks_kernel(keys: Array, values: Array, src: Array, dst: Array) -> None:
    pair = cuda.blockIdx.x
    copy_block(keys, dst[pair], keys, src[pair])
    copy_block(values, dst[pair], values, src[pair])


@kernel
def swap_blocks_kernel(source: Array, to: Array, src: Array, dst: Array) -> None:
    pair = cuda.blockIdx.x
    copy_block(to, dst[pair], source, src[pair])


def copy_blocks(key_cache: Array, value_cache: Array, src: Array, dst: Array) -> None:
    """See :meth:`kernels.ops.Ops.copy_blocks`. No block may be both copied from and copied to."""
    keys, values = _flat(key_cache), _flat(value_cache)
    launch(copy_blocks_kernel, _grid(src, keys), THREADS, keys, values, src, dst)


def swap_blocks(src_cache: Array, dst_cache: Array, src: Array, dst: Array) -> None:
    """See :meth:`kernels.ops.Ops.swap_blocks`. A NumPy pool beside a CuPy one is host memory (pinned, if it is to be fast)."""
    source, to = _flat(src_cache), _flat(dst_cache)
    if not SIMULATED and (isinstance(source, np.ndarray) or isinstance(to, np.ndarray)):
        _copy_between_host_and_device(source, to, to_host(src), to_host(dst))
    else:
        launch(swap_blocks_kernel, _grid(src, source), THREADS, source, to, to_device(src), to_device(dst))


def _copy_between_host_and_device(source: Array, to: Array, src: np.ndarray, dst: np.ndarray) -> None:
    """A strided copy a pair: a kernel could read host memory only where it is pinned and mapped."""
    import cupy

    num_layers, _, size = source.shape
    stream = cupy.cuda.get_current_stream()
    for source_block, to_block in zip(src, dst, strict=True):
        cupy.cuda.runtime.memcpy2DAsync(
            _address(to, int(to_block)),
            to.strides[0],
            _address(source, int(source_block)),
            source.strides[0],
            size * source.itemsize,
            num_layers,
            cupy.cuda.runtime.memcpyDefault,
            stream.ptr,
        )


def _address(pool: Array, block: int) -> int:
    first = pool.ctypes.data if isinstance(pool, np.ndarray) else pool.data.ptr
    return int(first) + block * int(pool.strides[1])


def _flat(pool: Array) -> Array:
    """A pool [L, num_blocks, ...] as a view [L, num_blocks, elements of a block]."""
    if not pool.flags.c_contiguous:
        raise ValueError(f"a pool of shape {pool.shape} and strides {pool.strides} is not contiguous; allowed: C order")
    return pool.reshape(pool.shape[0], pool.shape[1], -1)


def _grid(src: Array, pool: Array) -> tuple[int, int, int]:
    return len(src), pool.shape[0], min(blocks_for(pool.shape[2], THREADS), MAX_GRID_Z)
