"""Rotary positions, and the write of K and V into their pages: one fused kernel, a thread block a token.

Kernels come in two forms of the same arithmetic: where all arrays allow it, numbers are read and written 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

from ..dtypes import float_kind
from .formats import narrow
from .heads import have_wide_heads, load4, store4
from .intrinsics import load_floats, multiply, multiply_add, pack_bfloat16, pack_half, store16, store_floats
from .target import THREADS, address, cuda, device_function, divide, kernel, launch, pure_function

Array = Any


@pure_function
def turned(first: Any, second: Any, c: Any, s: Any) -> Any:
    """A pair turned by an angle, rounded in one way whatever the compiler makes of the code around."""
    return multiply_add(first, c, -multiply(second, s)), multiply_add(second, c, multiply(first, s))


@device_function
def rotate_plain(out: Array, x: Array, token: Any, position: Any, cos: Array, sin: Array) -> None:
    """out[token] = x[token] with the pairs (dim i, dim i + R/2) of all heads turned by the angles of ``position``."""
    half = cos.shape[1]
    for pair in range(cuda.threadIdx.x, x.shape[1] * half, THREADS):
        head = divide(pair, half)
        i = pair - head * half
        a, b = turned(x[token, head, i], x[token, head, i + half], cos[position, i], sin[position, i])
        out[token, head, i], out[token, head, i + half] = a, b


@device_function
def rotate_wide(out: Array, x: Array, token: Any, position: Any, cos: Array, sin: Array) -> None:
    """The same, four pairs at once."""
    half = cos.shape[1]
    fours = half // 4
    for i in range(cuda.threadIdx.x, x.shape[1] * fours, THREADS):
        head = divide(i, fours)
        dim = (i - head * fours) * 4
        a, b = load4(x, token, head, dim), load4(x, token, head, dim + half)
        place = position * half + dim
        c, s = load_floats(cos, place), load_floats(sin, place)
        a0, b0 = turned(a[0], b[0], c[0], s[0])
        a1, b1 = turned(a[1], b[1], c[1], s[1])
        a2, b2 = turned(a[2], b[2], c[2], s[2])
        a3, b3 = turned(a[3], b[3], c[3], s[3])
        store4(out, token, head, dim, (a0, a1, a2, a3))
        store4(out, token, head, dim + half, (b0, b1, b2, b3))


def _rope_kernel(rotate: Any) -> Any:
    @kernel
    def rope_kernel(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: Any) -> None:
        token = cuda.blockIdx.x
        rotate(out, x, token, min(positions[token], last), cos, sin)
        rotary = 2 * cos.shape[1]
        kept = x.shape[2] - rotary  # dims of a head that are not rotated
        for element in range(cuda.threadIdx.x, x.shape[1] * kept, THREADS):
            head = divide(element, kept)
            dim = rotary + element - head * kept
            out[token, head, dim] = x[token, head, dim]

    return rope_kernel


def _page_writer(kind: str) -> tuple[int, Any]:
    """How many numbers are 16 bytes of pages, and a function ``write(pages, offset, x, token, head, dim)`` that writes them."""
    if kind == "float32":

        @pure_function
        def write(pages: Array, offset: Any, x: Array, token: Any, head: Any, dim: Any) -> None:
            store_floats(pages, offset, load4(x, token, head, dim))

        return 4, write
    pack = pack_half if kind == "float16" else pack_bfloat16

    @pure_function
    def write_packed(pages: Array, offset: Any, x: Array, token: Any, head: Any, dim: Any) -> None:
        a, b = load4(x, token, head, dim), load4(x, token, head, dim + 4)
        store16(pages, offset, (pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])))

    return 8, write_packed


def _wide_cache_kernel(kind: str) -> Any:
    count, write = _page_writer(kind)

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
        num_kv_heads, head_dim, block_size = k.shape[1], k.shape[2], key_cache.shape[2]
        rotate_wide(q, q, token, positions[token], cos, sin)
        rotate_wide(k, k, token, positions[token], cos, sin)
        cuda.syncthreads()  # k as rotated by all threads is read next
        slot = slots[token]
        if slot >= 0:
            block, offset = slot // block_size, slot % block_size
            pieces = head_dim // count
            for i in range(cuda.threadIdx.x, num_kv_heads * pieces, THREADS):
                head = divide(i, pieces)
                dim = (i - head * pieces) * count
                place = ((block * num_kv_heads + head) * block_size + offset) * head_dim + dim
                write(key_cache, place, k, token, head, dim)
                write(value_cache, place, v, token, head, dim)

    return rope_and_cache_kernel


@kernel
def rope_and_cache_plain_kernel(
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
    rotate_plain(q, q, token, positions[token], cos, sin)
    rotate_plain(k, k, token, positions[token], cos, sin)
    cuda.syncthreads()  # k as rotated by all threads is read next
    slot = slots[token]
    if slot >= 0:
        block_size = key_cache.shape[2]
        block, offset = slot // block_size, slot % block_size
        for element in range(cuda.threadIdx.x, num_kv_heads * head_dim, THREADS):
            head = divide(element, head_dim)
            dim = element - head * head_dim
            key_cache[block, head, offset, dim] = narrow(key_cache, k[token, head, dim])
            value_cache[block, head, offset, dim] = narrow(value_cache, v[token, head, dim])


rope_kernels = {"wide": _rope_kernel(rotate_wide), "plain": _rope_kernel(rotate_plain)}
wide_cache_kernels = {kind: _wide_cache_kernel(kind) for kind in ("float32", "float16", "bfloat16")}


def rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
    """See :meth:`kernels.ops.Ops.rope`."""
    wide = _are_wide(cos, sin) and have_wide_heads(out, x)
    launch(rope_kernels["wide" if wide else "plain"], (x.shape[0],), THREADS, out, x, cos, sin, positions, last)


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
    wide = _are_wide(cos, sin, key_cache, value_cache) and have_wide_heads(q, k, v)
    function = wide_cache_kernels[float_kind(key_cache)] if wide else rope_and_cache_plain_kernel
    launch(function, (q.shape[0],), THREADS, q, k, v, cos, sin, positions, key_cache, value_cache, slots)


def _are_wide(*arrays: Array) -> bool:
    """Whether the rows of all begin at multiples of 16 bytes and end at them."""
    return all(x.flags.c_contiguous and x.shape[-1] * x.itemsize % 16 == 0 and address(x) % 16 == 0 for x in arrays)
