"""The kernel of paged attention: parts of a tile's keys and values, as :mod:`.attention_tile` deals them out."""

from __future__ import annotations

from typing import Any

from numpy import float32

from .attention_steps import locate_tokens, make_steps, steps_of, store_dims
from .attention_tile import (
    PART,
    STEP,
    SUMS,
    TILE_ROWS,
    UNIT,
    WARPS,
    Arithmetic,
    Shape,
    finite_base,
    max_of_warps,
    padded_dim,
    parts_of,
    sequence_of_tile,
    sum_of_warps,
)
from .intrinsics import multiply
from .target import WARP, bounded_kernel, cuda, divide, int32
from .warps import quad_max, quad_sum

Array = Any

#: Tiles that a multiprocessor is to hold at once, which are half of its warps: this bounds the registers of a thread.
TILES = 8


def part_kernel(arithmetic: Arithmetic, shape: Shape) -> Any:
    """The kernel for parts. Its grid is blocks of rows x kv heads x parts, those of the sinks before the others.

    Blocks are those from ``first_tile`` on, and what they keep is for the tokens ``first_token`` .. ``last_token``.
    """
    block_size, row_tiles, padded = shape.block_size, shape.row_tiles, padded_dim(shape.head_dim)
    word, query_size = arithmetic.word, arithmetic.query_size
    prepare, accumulate = arithmetic.prepare, arithmetic.accumulate
    block_rows, shift = row_tiles * TILE_ROWS, row_tiles + 2
    units = -(-shape.head_dim // UNIT)
    splits = WARPS // units  # warps that share a unit, each with some of the tokens
    score_steps, weigh, add_splits = make_steps(arithmetic, units)
    # Numba takes names for the sizes of arrays, and no expressions.
    query_words, weight_words = row_tiles * query_size, PART * TILE_ROWS
    shared_words, warp_rows = query_words + row_tiles * weight_words, row_tiles * WARPS * TILE_ROWS

    def attention_kernel(
        scratch: Array,
        q: Array,
        sink_q: Array,
        keys: Array,
        values: Array,
        block_tables: Array,
        context_lens: Array,
        query_start: Array,
        scale: Any,
        soft_cap: Any,
        window: Any,
        num_sinks: Any,
        first_tile: Any,
        first_token: Any,
        last_token: Any,
    ) -> None:
        # Queries and weights are one array: else the compiler reads the queries once, into 32 registers of each thread.
        shared = cuda.shared.array(shared_words, word, alignment=16)
        rows = cuda.shared.array(PART, int32)
        warp_largest, warp_sums = cuda.shared.array(warp_rows, float32), cuda.shared.array(warp_rows, float32)
        # Of each row: token and head (-1: there is no such row), and the tokens start .. stop that it sees of the part.
        row_token, row_head = cuda.shared.array(block_rows, int32), cuda.shared.array(block_rows, int32)
        row_start, row_stop = cuda.shared.array(block_rows, int32), cuda.shared.array(block_rows, int32)
        seen = cuda.shared.array(2, int32)  # of the part, to keep it out of registers
        sums = cuda.local.array(SUMS, float32)

        thread = int32(cuda.threadIdx.x & 1023)  # that it is not negative shortens each index made of it
        lane, warp, row_tile = int32(thread & 31), int32(thread >> 5 & 3), int32(thread >> 7 if row_tiles > 1 else 0)
        kv_head, num_kv_heads = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        group = divide(q.shape[1], num_kv_heads)

        # The block's rows, the tokens that any of them sees, start .. stop, and those of the part, low .. high behind its first.
        tile = cuda.blockIdx.x + first_tile
        sequence = sequence_of_tile(tile, query_start, group, shift)
        first_query = query_start[sequence]
        num_queries = int32(query_start[sequence + 1] - first_query)
        first_row = int32((tile - (first_query * group >> shift) - sequence) << shift)
        num_rows = int32(min(num_queries * group - first_row, block_rows))
        if num_rows <= 0:
            return  # all threads leave together
        sink_parts = parts_of(num_sinks)
        of_sinks = cuda.blockIdx.z < sink_parts
        first = int32((cuda.blockIdx.z if of_sinks else cuda.blockIdx.z - sink_parts) * PART)
        past = int32(context_lens[sequence] - num_queries)
        stop = int32(past + divide(first_row + num_rows - 1, group) + 1)
        start = int32(max(past + divide(first_row, group) + 1 - window, num_sinks) if window > 0 else num_sinks)
        if of_sinks:
            start, stop = int32(0), int32(min(num_sinks, stop))
        low, high = int32(max(start - first, 0)), int32(min(stop - first, PART))
        if low >= high:
            return
        if thread == 0:
            seen[0], seen[1] = low, high
        if thread < block_rows:
            index = divide(first_row + thread, group)
            end = past + index + 1 if thread < num_rows else 0
            row_token[thread] = first_query + index if thread < num_rows else -1
            row_head[thread] = kv_head * group + first_row + thread - index * group
            row_stop[thread] = (min(end, num_sinks) if of_sinks else end) - first
            row_start[thread] = start if of_sinks or window <= 0 else max(end - window, num_sinks)
            row_start[thread] -= first
        locate_tokens(rows, first, start, stop, block_tables, sequence, block_size, kv_head, num_kv_heads)
        cuda.syncthreads()

        row, of_warps = int32(row_tile * TILE_ROWS + (lane >> 2)), int32(row_tile * WARPS * TILE_ROWS)
        own = int32(of_warps + warp * TILE_ROWS + (lane >> 2))
        query, weights = int32(row_tile * query_size), int32(query_words + row_tile * weight_words)
        if of_sinks:  # which have a query of their own
            factor = prepare(shared, query, sink_q, row_token[row], row_head[row], warp, lane)
        else:
            factor = prepare(shared, query, q, row_token[row], row_head[row], warp, lane)
        cuda.syncthreads()
        steps, row_scale = steps_of(warp, seen[0], seen[1]), multiply(scale, factor)
        largest = score_steps(
            shared, query, weights, keys, rows, steps, row_start, row_stop, row, row_scale, soft_cap, lane
        )
        largest = quad_max(largest)
        if lane & 3 == 0:
            warp_largest[own] = largest
        cuda.syncthreads()
        base = finite_base(max_of_warps(warp_largest, of_warps + (lane >> 2)))
        weight_sum = quad_sum(weigh(shared, weights, steps_of(warp, seen[0], seen[1]), base, lane))
        if lane & 3 == 0:
            warp_sums[own] = weight_sum
        cuda.syncthreads()

        unit, split = int32(warp % units), int32(warp // units)
        for i in range(SUMS):
            sums[i] = float32(0)
        if split < splits:
            first_step = int32(seen[0] >> 4)
            first_step = int32(first_step + (split - first_step & splits - 1))
            for step in range(first_step, int32((seen[1] + STEP - 1) >> 4), int32(splits)):
                accumulate(sums, shared, weights, step, values, rows, step * STEP, unit, lane)
        if splits > 1:
            add_splits(sums, shared, weights, unit, split, lane)
        if split > 0:
            return
        num_parts, num_tokens = cuda.gridDim.z, last_token - first_token
        for which in range(2):
            i = int32(2 * (lane & 3) + which)
            largest, weight_sum = max_of_warps(warp_largest, of_warps + i), sum_of_warps(warp_sums, of_warps + i)
            token = row_token[row_tile * TILE_ROWS + i] - first_token
            if token >= 0 and token < num_tokens:
                index = (token * q.shape[1] + row_head[row_tile * TILE_ROWS + i]) * num_parts + cuda.blockIdx.z
                dim = unit * UNIT + 8 * (lane >> 2)
                store_dims(scratch, index * padded + dim, padded - dim, sums, which)
                if unit == 0 and lane < 4:
                    statistics = num_tokens * q.shape[1] * num_parts * padded + 2 * index
                    scratch[statistics], scratch[statistics + 1] = largest, weight_sum

    return bounded_kernel(row_tiles * WARPS * WARP, TILES // row_tiles)(attention_kernel)
