"""Products of paged attention by plain multiply-adds, for float32 pages, and for any others that tensor cores do not take."""

from __future__ import annotations

from typing import Any

from numpy import float32, int64

from .attention_tile import STEP, TILE_ROWS, UNIT, WARPS, Arithmetic
from .formats import widen
from .intrinsics import hidden, load_floats, multiply_add, store_floats
from .target import cuda, device_function, pure_function
from .warps import quad_sum

Array = Any

CHUNK = 16  #: dims of a key that four lanes read at once


def arithmetic(head_dim: int, wide: bool, load_query: Any) -> Arithmetic:
    """``wide``: pages are float32, and may be read 16 bytes at a time.

    ``load_query(q, token, head, dim)`` gives 4 dims of a query, 0 behind the last.
    """
    chunks = -(-head_dim // CHUNK)
    padded, num_dots = chunks * CHUNK, 2 * TILE_ROWS

    @device_function
    def prepare(shared: Array, first: Any, q: Array, token: Any, head: Any, warp: Any, lane: Any) -> Any:
        for chunk in range(warp, chunks, WARPS):
            a = b = c = d = float32(0)
            dim = CHUNK * chunk + 4 * (lane & 3)
            if token >= 0:
                a, b, c, d = load_query(q, token, head, dim)
            store_floats(shared, first + (lane >> 2) * padded + dim, (a, b, c, d))
        return float32(1)

    @pure_function
    def element(pages: Array, offset: Any, dim: Any) -> Any:
        return widen(pages[offset + dim]) if dim < head_dim else float32(0)

    @pure_function
    def page4(pages: Array, row: Any, dim: Any) -> Any:
        """4 dims of a row of the pages, 0 behind the last."""
        offset = int64(row) * head_dim
        if wide:
            if dim < head_dim:
                return load_floats(pages, offset + dim)
            return float32(0), float32(0), float32(0), float32(0)
        return (
            element(pages, offset, dim),
            element(pages, offset, dim + 1),
            element(pages, offset, dim + 2),
            element(pages, offset, dim + 3),
        )

    @pure_function
    def dot4(total: Any, x: Any, y: Any) -> Any:
        total = multiply_add(x[0], y[0], total)
        total = multiply_add(x[1], y[1], total)
        total = multiply_add(x[2], y[2], total)
        return multiply_add(x[3], y[3], total)

    @device_function
    def score(
        shared: Array, first: Any, weights: Any, step: Any, keys: Array, row: Any, other_row: Any, lane: Any
    ) -> Any:
        # Each lane has every fourth four of the dims; lanes of the same g add theirs up. Then lanes exchange scores.
        dots, p = cuda.local.array(num_dots, float32), lane & 3
        for i in range(2 * TILE_ROWS):
            dots[i] = float32(0)
        for chunk in range(hidden(chunks)):  # one after the other, for the sake of registers
            dim = CHUNK * chunk + 4 * p
            key, other_key = page4(keys, row, dim), page4(keys, other_row, dim)
            for i in range(TILE_ROWS):
                x = load_floats(shared, first + i * padded + dim)
                dots[2 * i], dots[2 * i + 1] = dot4(dots[2 * i], key, x), dot4(dots[2 * i + 1], other_key, x)
        cuda.syncwarp()
        place = weights + (step * STEP + (lane >> 2)) * TILE_ROWS
        for i in range(TILE_ROWS):
            near, far = quad_sum(dots[2 * i]), quad_sum(dots[2 * i + 1])
            if i >> 1 == p:
                shared[place + i], shared[place + 8 * TILE_ROWS + i] = near, far
        cuda.syncwarp()
        return get(shared, weights, step, lane)

    @pure_function
    def put(shared: Array, weights: Any, step: Any, four: Any, lane: Any) -> None:
        place = weights + (step * STEP + 2 * (lane & 3)) * TILE_ROWS + (lane >> 2)
        shared[place], shared[place + TILE_ROWS] = four[0], four[1]
        shared[place + 8 * TILE_ROWS], shared[place + 9 * TILE_ROWS] = four[2], four[3]

    @pure_function
    def get(shared: Array, weights: Any, step: Any, lane: Any) -> Any:
        place = weights + (step * STEP + 2 * (lane & 3)) * TILE_ROWS + (lane >> 2)
        far = place + 8 * TILE_ROWS
        return shared[place], shared[place + TILE_ROWS], shared[far], shared[far + TILE_ROWS]

    @pure_function
    def keep(shared: Array, weights: Any, step: Any, four: Any, lane: Any) -> Any:
        put(shared, weights, step, four, lane)
        return four

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
        dim = UNIT * unit + 8 * (lane >> 2)
        for i in range(STEP):
            place = weights + (step * STEP + i) * TILE_ROWS + 2 * (lane & 3)
            a, b = shared[place], shared[place + 1]
            for half in range(2):
                four = page4(values, rows[first + i], dim + 4 * half)
                for k in range(4):
                    j = 8 * half + 2 * k
                    sums[j], sums[j + 1] = multiply_add(a, four[k], sums[j]), multiply_add(b, four[k], sums[j + 1])

    return Arithmetic(float32, padded * TILE_ROWS, prepare, score, put, get, keep, accumulate)
