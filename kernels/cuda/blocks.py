"""Copies of whole blocks, within the pools and between pools: K and V, all layers and all pairs of blocks in one launch.

A pool may be in host memory that is pinned and mapped: the same kernel reads or writes it over the bus.
"""

from __future__ import annotations

from typing import Any

from .intrinsics import load16, store16
from .target import THREADS, address, blocks_for, cuda, kernel, launch

Array = Any

ELEMENTS = 2  #: that a thread copies of each pool, where the grid allows it: enough loads in flight to fill a bus
MAX_GRID_Z = 65535


@kernel
def copy_wide_kernel(
    src_keys: Array, src_values: Array, dst_keys: Array, dst_values: Array, src: Array, dst: Array
) -> None:
    """Pools [L, num_blocks, words] of uint32. A pair by ``blockIdx.x``, a layer by y, sixteen bytes by z and the thread."""
    pair, layer, size = cuda.blockIdx.x, cuda.blockIdx.y, src_keys.shape[2]
    source = (layer * src_keys.shape[1] + src[pair]) * size
    target = (layer * dst_keys.shape[1] + dst[pair]) * size
    for i in range(4 * (cuda.blockIdx.z * THREADS + cuda.threadIdx.x), size, 4 * cuda.gridDim.z * THREADS):
        key, value = load16(src_keys, source + i), load16(src_values, source + i)
        store16(dst_keys, target + i, key)
        store16(dst_values, target + i, value)


@kernel
def copy_plain_kernel(
    src_keys: Array, src_values: Array, dst_keys: Array, dst_values: Array, src: Array, dst: Array
) -> None:
    """The same, of any elements and one by one."""
    pair, layer = cuda.blockIdx.x, cuda.blockIdx.y
    for i in range(cuda.blockIdx.z * THREADS + cuda.threadIdx.x, src_keys.shape[2], cuda.gridDim.z * THREADS):
        dst_keys[layer, dst[pair], i] = src_keys[layer, src[pair], i]
        dst_values[layer, dst[pair], i] = src_values[layer, src[pair], i]


def copy_blocks(key_cache: Array, value_cache: Array, src: Array, dst: Array) -> None:
    """See :meth:`kernels.ops.Ops.copy_blocks`. No block may be both copied from and copied to."""
    swap_blocks(key_cache, value_cache, key_cache, value_cache, src, dst)


def swap_blocks(src_keys: Array, src_values: Array, dst_keys: Array, dst_values: Array, src: Array, dst: Array) -> None:
    """See :meth:`kernels.ops.Ops.swap_blocks`."""
    pools = [_flat(pool) for pool in (src_keys, src_values, dst_keys, dst_values)]
    num_layers, _, size = pools[0].shape
    is_wide = size * pools[0].itemsize % 16 == 0 and all(address(pool) % 16 == 0 for pool in pools)
    if is_wide:
        pools = [pool.view("uint32") for pool in pools]
    function = copy_wide_kernel if is_wide else copy_plain_kernel
    accesses = pools[0].shape[2] // 4 if is_wide else size
    grid = len(src), num_layers, min(blocks_for(accesses, ELEMENTS * THREADS), MAX_GRID_Z)
    launch(function, grid, THREADS, *pools, src, dst)


def _flat(pool: Array) -> Array:
    """A pool [L, num_blocks, ...] as a view [L, num_blocks, elements of a block]."""
    if not pool.flags.c_contiguous:
        raise ValueError(f"a pool of shape {pool.shape} and strides {pool.strides} is not contiguous; allowed: C order")
    return pool.reshape(pool.shape[0], pool.shape[1], -1)
