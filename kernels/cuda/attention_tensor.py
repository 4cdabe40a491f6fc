"""Products of paged attention on tensor cores, for float16 and bfloat16 pages with heads of a multiple of 8 dims.

A lane reads the pages 16 bytes at a time and uses the words as they come: which of a product's inner indices is which dim does
not matter where both sides agree. It is here: lane (g, p) has the dims 8 p .. 8 p + 7 of 32 of a key, and the words of its two
products are those of dims 8 p + 4 s, with s = 0, 1. A float32 is two 16-bit numbers, the nearest one and what that leaves: of
queries they are the upper and the lower 8 rows of one product, of weights two products.
"""

from __future__ import annotations

from typing import Any

from numpy import float32, int64, uint32

from . import intrinsics
from .attention_tile import TILE_ROWS, UNIT, WARPS, Arithmetic
from .intrinsics import bits_float, float_bits, load16, load_floats, multiply, permute_bytes, store16, store_floats
from .target import WARP, device_function, pure_function
from .warps import quad_max

Array = Any

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  #: of two words, as one
CHUNK = 32  #: dims of a key that four lanes read at once
MOST_EXPONENT = 253  #: of which the inverse power of two is a normal float32


def arithmetic(kind: str, head_dim: int, load_query: Any) -> Arithmetic:
    """``kind`` is that of the pages; ``load_query(q, token, head, dim)`` gives 4 dims of a query, 0 behind the last."""
    pack, unpack = getattr(intrinsics, f"pack_{_NAMES[kind]}"), getattr(intrinsics, f"unpack_{_NAMES[kind]}")
    mma = getattr(intrinsics, f"mma_{_NAMES[kind]}")
    chunks = -(-head_dim // CHUNK)

    @pure_function
    def split(low: Any, high: Any) -> Any:
        """Two floats as a word of their nearest 16-bit numbers, and one of what those leave."""
        word = pack(low, high)
        near_low, near_high = unpack(word)
        return word, pack(low - near_low, high - near_high)

    @device_function
    def prepare(shared: Array, first: Any, q: Array, token: Any, head: Any, warp: Any, lane: Any) -> Any:
        # A power of two brings the row's largest number to 1 .. 2, so that float16 neither overflows nor loses digits.
        dim = 8 * (lane & 3)
        largest = float32(0)
        for chunk in range(chunks):
            for half in range(2):
                if token >= 0:
                    a, b, c, d = load_query(q, token, head, CHUNK * chunk + dim + 4 * half)
                    largest = max(largest, max(max(abs(a), abs(b)), max(abs(c), abs(d))))
        exponent = min(float_bits(quad_max(largest)) >> uint32(23), uint32(MOST_EXPONENT))
        up = bits_float(uint32(uint32(MOST_EXPONENT + 1) - exponent) << uint32(23))
        for chunk in range(warp, chunks, WARPS):
            for half in range(2):
                a = b = c = d = float32(0)
                if token >= 0:
                    a, b, c, d = load_query(q, token, head, CHUNK * chunk + dim + 4 * half)
                near, near_rest = split(multiply(a, up), multiply(b, up))
                far, far_rest = split(multiply(c, up), multiply(d, up))
                store16(shared, first + ((2 * chunk + half) * WARP + lane) * 4, (near, near_rest, far, far_rest))
        return bits_float(uint32(exponent << uint32(23)))

    @pure_function
    def row16(pages: Array, row: Any, dim: Any) -> Any:
        """8 dims of a row of the pages, 0 behind the last."""
        if dim < head_dim:
            return load16(pages, int64(row) * head_dim + dim)
        return uint32(0), uint32(0), uint32(0), uint32(0)

    @pure_function
    def score(
        shared: Array, first: Any, weights: Any, step: Any, keys: Array, row: Any, other_row: Any, lane: Any
    ) -> Any:
        near = far = float32(0), float32(0), float32(0), float32(0)
        for chunk in range(chunks):
            dim, place = CHUNK * chunk + 8 * (lane & 3), first + (2 * chunk * WARP + lane) * 4
            key, other_key = row16(keys, row, dim), row16(keys, other_row, dim)
            query = load16(shared, place)
            near, far = mma(near, query, (key[0], key[1])), mma(far, query, (other_key[0], other_key[1]))
            query = load16(shared, place + 4 * WARP)
            near, far = mma(near, query, (key[2], key[3])), mma(far, query, (other_key[2], other_key[3]))
        return near[0] + near[2], near[1] + near[3], far[0] + far[2], far[1] + far[3]

    @pure_function
    def put(shared: Array, weights: Any, step: Any, four: Any, lane: Any) -> None:
        store_floats(shared, weights + (step * WARP + lane) * 4, four)

    @pure_function
    def get(shared: Array, weights: Any, step: Any, lane: Any) -> Any:
        return load_floats(shared, weights + (step * WARP + lane) * 4)

    @pure_function
    def keep(shared: Array, weights: Any, step: Any, four: Any, lane: Any) -> Any:
        near, near_rest = split(four[0], four[1])
        far, far_rest = split(four[2], four[3])
        store16(shared, weights + (step * WARP + lane) * 4, (near, far, near_rest, far_rest))
        (a, b), (a_rest, b_rest) = unpack(near), unpack(near_rest)
        (c, d), (c_rest, d_rest) = unpack(far), unpack(far_rest)
        return a + a_rest, b + b_rest, c + c_rest, d + d_rest

    @pure_function
    def add(sums: Array, pair: Any, a: Any, b: Any, c: Any, d: Any, weights: Any) -> None:
        """Two dims, 2 ``pair`` and the next, of four tokens."""
        low, high = uint32(LOW_HALVES), uint32(HIGH_HALVES)
        left = permute_bytes(a, b, low), permute_bytes(a, b, high), permute_bytes(c, d, low), permute_bytes(c, d, high)
        i = 4 * pair
        four = sums[i], sums[i + 1], sums[i + 2], sums[i + 3]
        four = mma(mma(four, left, (weights[0], weights[1])), left, (weights[2], weights[3]))
        sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = four

    @pure_function
    def accumulate(
        sums: Array,
        shared: Array,
        weights: Any,
        step: Any,
        values: Array,
        rows: Array,
        first: Any,
        unit: Any,
        lane: Any,
    ) -> None:
        i, dim = first + 2 * (lane & 3), UNIT * unit + 8 * (lane >> 2)
        a, b = row16(values, rows[i], dim), row16(values, rows[i + 1], dim)
        c, d = row16(values, rows[i + 8], dim), row16(values, rows[i + 9], dim)
        words = load16(shared, weights + (step * WARP + lane) * 4)
        for pair in range(4):
            add(sums, pair, a[pair], b[pair], c[pair], d[pair], words)

    return Arithmetic(uint32, chunks * WARP * TILE_ROWS, prepare, score, put, get, keep, accumulate)


_NAMES = {"float16": "half", "bfloat16": "bfloat16"}
