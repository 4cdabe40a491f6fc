"""Rotary positions (Su et al. 2021), and the write of K and V into their pages, fused as in PagedAttention."""

from __future__ import annotations

import functools

import numpy as np
from numba import prange

from ..ops import Array
from .jit import INPUT_MATRIX, Kernel, inner
from .storage import NUMBA_STORAGE, as_numba, narrow

_HEADS = "float32[:, :, :]"
_TABLES = f"{INPUT_MATRIX}, {INPUT_MATRIX}, int32[::1]"
_SERIAL = 1 << 14  #: elements below which starting the threads takes longer than the work


def rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
    """out = x rotated to the position min(positions, last); see :class:`minipage.kernels.ops.Ops`."""
    _rope_kernel(out, x, cos, sin, positions, last)


def rope_and_cache(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Array,
) -> None:
    """Rotate q and k in place, then write k and v to their slots; see :class:`minipage.kernels.ops.Ops`."""
    pages = as_numba(key_cache), as_numba(value_cache)
    _kernel(key_cache.dtype)(q, k, v, cos, sin, positions, *pages, slots)


@functools.cache
def _kernel(dtype: np.dtype) -> Kernel:
    pages = f"{NUMBA_STORAGE[dtype]}[:, :, :, ::1]"
    signature = f"{_HEADS}, {_HEADS}, {_HEADS}, {_TABLES}, {pages}, {pages}, int64[::1]"
    return Kernel(_rope_and_cache, signature, parallel=True)


def _rope_and_cache(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Array,
) -> None:
    if q.size < _SERIAL:
        for t in range(len(q)):
            _rotate(q[t], cos[positions[t]], sin[positions[t]])
            _rotate(k[t], cos[positions[t]], sin[positions[t]])
            _write(k[t], v[t], key_cache, value_cache, slots[t])
    else:
        for t in prange(len(q)):
            _rotate(q[t], cos[positions[t]], sin[positions[t]])
            _rotate(k[t], cos[positions[t]], sin[positions[t]])
            _write(k[t], v[t], key_cache, value_cache, slots[t])


def _rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
    if x.size < _SERIAL:
        for t in range(len(x)):
            out[t] = x[t]
            _rotate(out[t], cos[min(positions[t], last)], sin[min(positions[t], last)])
    else:
        for t in prange(len(x)):
            out[t] = x[t]
            _rotate(out[t], cos[min(positions[t], last)], sin[min(positions[t], last)])


_rope_kernel = Kernel(_rope, f"{_HEADS}, {_HEADS}, {_TABLES}, int64", parallel=True)


@inner
def _rotate(x: Array, cos: Array, sin: Array) -> None:
    """Turn each pair (dim i, dim i + R/2) of the heads x [heads, D] of a token by its angle; cos and sin [R/2]."""
    half = len(cos)
    for head in range(len(x)):
        for i in range(half):
            first, second = x[head, i], x[head, i + half]
            x[head, i] = first * cos[i] - second * sin[i]
            x[head, i + half] = second * cos[i] + first * sin[i]


@inner
def _write(k: Array, v: Array, key_cache: Array, value_cache: Array, slot: int) -> None:
    """Write k and v [KVH, D] of a token to its slot; a negative slot is padding."""
    if slot < 0:
        return
    block_size = value_cache.shape[2]
    block, offset = slot // block_size, slot % block_size
    for head in range(k.shape[0]):
        for d in range(k.shape[1]):
            key_cache[block, head, d, offset] = narrow(k[head, d], key_cache)
            value_cache[block, head, offset, d] = narrow(v[head, d], value_cache)
