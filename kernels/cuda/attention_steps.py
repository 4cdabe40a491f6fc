"""The steps of the kernel of paged attention, each for a warp and its tile, in their order."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy import float32

from .attention_tile import NOTHING, PART, STEP, WARP_STEPS, WARPS, Arithmetic, capped
from .intrinsics import exp2, hidden, multiply, store_floats
from .target import cuda, device_function, divide, int32, pure_function, uint32

Array = Any


class Steps(NamedTuple):
    """What depends on the arithmetic."""

    score: Any
    weigh: Any
    add_splits: Any


@pure_function
def steps_of(warp: Any, low: Any, high: Any) -> Any:
    """The warp's steps, from one to another, that have any of the tokens low .. high of a part."""
    return int32(max(low >> 4, WARP_STEPS * warp)), int32(min((high + STEP - 1) >> 4, WARP_STEPS * (warp + 1)))


@device_function
def locate_tokens(
    rows: Array,
    first: Any,
    start: Any,
    stop: Any,
    block_tables: Array,
    sequence: Any,
    block_size: Any,
    kv_head: Any,
    kv_heads: Any,
) -> None:
    """Where the tokens of a part lie, as rows of the pages.

    In place of a token that no query of the block sees, another that is seen: it will get no weight.
    """
    for i in range(int32(cuda.threadIdx.x), int32(PART), int32(cuda.blockDim.x)):
        position = int32(min(max(first + i, start), stop - 1))
        entry = divide(position, block_size)
        block = block_tables[sequence, entry]
        rows[i] = (block * kv_heads + kv_head) * block_size + position - entry * block_size


@pure_function
def store_dims(array: Array, offset: Any, size: Any, sums: Array, which: Any) -> None:
    """The lane's 8 dims of row ``which`` of its two, up to ``size`` of them, to a float32 array, 16 bytes at a time."""
    for half in range(2):
        if 4 * half < size:
            i = 8 * half + which
            store_floats(array, offset + 4 * half, (sums[i], sums[i + 2], sums[i + 4], sums[i + 6]))


def make_steps(arithmetic: Arithmetic, units: int) -> Steps:
    """The steps for one arithmetic, where a tile has so many units of dims."""
    score, put, get, keep = arithmetic.score, arithmetic.put, arithmetic.get, arithmetic.keep
    splits = WARPS // units  # warps that share a unit, each with some of the tokens

    @device_function
    def score_steps(
        shared: Array,
        query: Any,
        weights: Any,
        keys: Array,
        rows: Array,
        steps: Any,
        row_start: Array,
        row_stop: Array,
        row: Any,
        scale: Any,
        cap: Any,
        lane: Any,
    ) -> Any:
        """The scores of the lane's ``row`` with those tokens of some steps that it sees, and the largest of them."""
        largest = NOTHING
        for step in range(steps[0], steps[1]):
            key = uint32(step * STEP + (lane >> 2))
            a, b, c, d = score(shared, query, weights, step, keys, rows[key], rows[uint32(key + 8)], lane)
            a, b, c, d = multiply(a, scale), multiply(b, scale), multiply(c, scale), multiply(d, scale)
            if cap > float32(0):
                a, b, c, d = capped(a, cap), capped(b, cap), capped(c, cap), capped(d, cap)
            i = int32(step * STEP + 2 * (lane & 3))
            low, high = row_start[row], row_stop[row]  # here, to keep them out of registers
            a = a if low <= i and i < high else NOTHING
            b = b if low <= i + 1 and i + 1 < high else NOTHING
            c = c if low <= i + 8 and i + 8 < high else NOTHING
            d = d if low <= i + 9 and i + 9 < high else NOTHING
            put(shared, weights, step, (a, b, c, d), lane)
            largest = max(largest, max(max(a, b), max(c, d)))
        return largest

    @device_function
    def weigh_steps(shared: Array, weights: Any, steps: Any, base: Any, lane: Any) -> Any:
        """Scores to weights, and their sum."""
        weight_sum = float32(0)
        for step in range(steps[0], steps[1]):
            a, b, c, d = get(shared, weights, step, lane)
            four = exp2(a - base), exp2(b - base), exp2(c - base), exp2(d - base)
            a, b, c, d = keep(shared, weights, step, four, lane)
            weight_sum += (a + b) + (c + d)
        return weight_sum

    @device_function
    def add_splits(sums: Array, shared: Array, weights: Any, unit: Any, split: Any, lane: Any) -> None:
        """The sums of the warps that share a unit, to the first of them, in their order."""
        cuda.syncthreads()  # the weights have been read: their place is free
        if split > 0 and split < splits:
            for i in range(4):
                four = sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]
                put(shared, weights, ((split - 1) * units + unit) * 4 + i, four, lane)
        cuda.syncthreads()
        # The first of a unit, the one that goes through this loop, reads the others one by one, and not all into registers.
        for other in range(split * splits, hidden(splits - 1)):
            for i in range(4):
                a, b, c, d = get(shared, weights, (other * units + unit) * 4 + i, lane)
                sums[4 * i], sums[4 * i + 1] = sums[4 * i] + a, sums[4 * i + 1] + b
                sums[4 * i + 2], sums[4 * i + 3] = sums[4 * i + 2] + c, sums[4 * i + 3] + d

    return Steps(score_steps, weigh_steps, add_splits)
