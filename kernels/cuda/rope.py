"""Rotary positions, and the write of K and V into their pages: one fused kernel, a thread block a token."""

from __future__ import annotations

from typing import Any

from .formats import narrow
from .target import THREADS, cuda, device_function, kernel, launch

Array = Any


@device_function
def rotate(out: Array, x: Array, token: Any, position: Any, cos: Array, sin: Array) -> None:
    """out[token] = x[token] with the pairs (dim i, dim i + R/2) of all heads turned by the angles of ``position``."""
    half = cos.shape[1]
    for pair in range(cuda.threadIdx.x, x.shape[1] * half, THREADS):
        head, i = pair // half, pair % half
        first, second = x[token, head, i], x[token, head, i + half]
        c, s = cos[position, i], sin[position, i]
        out[token, head, i] = first * c - second * s
        out[token, head, i + half] = second * c + first * s


@kernel
def rope_kernel(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: Any) -> None:
    token = cuda.blockIdx.x
    rotate(out, x, token, min(positions[token], last), cos, sin)
    rotary = 2 * cos.shape[1]
    kept = x.shape[2] - rotary  # dims of a head that are not rotated
    for element in range(cuda.threadIdx.x, x.shape[1] * kept, THREADS):
        head, dim = element // kept, rotary + element % kept
        out[token, head, dim] = x[token, head, dim]


def rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
    """See :meth:`kernels.ops.Ops.rope`."""
    launch(rope_kernel, (x.shape[0],), THREADS, out, x, cos, sin, positions, last)


@kernel
def rope_and_cache_kernel(
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
    token = cuda.blockIdx.x
    num_kv_heads, head_dim = k.shape[1], k.shape[2]
    rotate(q, q, token, positions[token], cos, sin)
    rotate(k, k, token, positions[token], cos, sin)
    cuda.syncthreads()  # k as rotated by all threads is read next
    slot = slots[token]
    if slot >= 0:
        block_size = key_cache.shape[2]
        block, offset = slot // block_size, slot % block_size
        for element in range(cuda.threadIdx.x, num_kv_heads * head_dim, THREADS):
            head, dim = element // head_dim, element % head_dim
            key_cache[block, head, offset, dim] = narrow(key_cache, k[token, head, dim])
            value_cache[block, head, offset, dim] = narrow(value_cache, v[token, head, dim])


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
    """See :meth:`kernels.ops.Ops.rope_and_cache`."""
    launch(rope_and_cache_kernel, (q.shape[0],), THREADS, q, k, v, cos, sin, positions, key_cache, value_cache, slots)
