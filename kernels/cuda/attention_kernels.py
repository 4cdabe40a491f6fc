"""The kernel of paged attention: parts of a tile's keys and values, as :mod:`.attention_tile` deals them out."""

from __future__ import annotations

from typing import Any

from numpy import float32

from .attention_steps import TOTALS, fold, locate_tokens, make_steps, seen_span, steps_of, store_dims
from .attention_tile import (
    NOTHING,
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
    quad_max,
    quad_sum,
    sequence_of_tile,
    sum_of_warps,
)
from .intrinsics import multiply
from .target import WARP, bounded_kernel, cuda, divide, int32

Array = Any


def part_kernel(arithmetic: Arithmetic, shape: Shape, tiles: int) -> Any:
    """The kernel for parts. Its grid is blocks of rows x kv heads x parts, the last of them 1 where ``whole``.

    A multiprocessor is to hold the blocks of so many ``tiles``, which bounds the registers of a thread.
    """
    head_dim, block_size, has_sinks, whole = shape
    word, query_size, prepare, put, accumulate = (
        arithmetic.word,
        arithmetic.query_size,
        arithmetic.prepare,
        arithmetic.put,
        arithmetic.accumulate,
    )
    row_tiles, padded = shape.row_tiles, padded_dim(head_dim)
    block_rows, shift = row_tiles * TILE_ROWS, row_tiles + 2
    units = -(-head_dim // UNIT)
    splits = WARPS // units  # warps that share a unit, each with some of the tokens
    score_steps, weigh, add_splits = make_steps(arithmetic, units)
    first_source = 0 if has_sinks else 1
    # Numba takes names for the sizes of arrays, and no expressions.
    query_words, weight_words = row_tiles * query_size, PART * TILE_ROWS
    shared_words, warp_rows = query_words + row_tiles * weight_words, row_tiles * WARPS * TILE_ROWS
    total_words = row_tiles * units * TOTALS * WARP if whole else 1

    def attention_kernel(
        out: Array,
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
        num_parts: Any,
    ) -> None:
        # Queries and weights are one array: else the compiler reads the queries once, into 32 registers of each thread.
        shared = cuda.shared.array(shared_words, word)
        rows = cuda.shared.array(PART, int32)
        warp_largest, warp_sums = cuda.shared.array(warp_rows, float32), cuda.shared.array(warp_rows, float32)
        total = cuda.shared.array(total_words, float32)
        # Of each row: token and head (-1: there is no such row), and the tokens start .. stop that it sees, besides the sinks.
        row_token, row_head = cuda.shared.array(block_rows, int32), cuda.shared.array(block_rows, int32)
        row_start, row_stop = cuda.shared.array(block_rows, int32), cuda.shared.array(block_rows, int32)
        sight = cuda.shared.array(4, int32)  # of the block, to keep it out of registers
        sums = cuda.local.array(SUMS, float32)

        thread = int32(cuda.threadIdx.x & 1023)  # that it is not negative shortens each index made of it
        lane, warp, row_tile = int32(thread & 31), int32(thread >> 5 & 3), int32(thread >> 7 if row_tiles > 1 else 0)
        kv_head, num_kv_heads = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        group = divide(q.shape[1], num_kv_heads)

        # The block's rows, and the tokens that any of them sees: the sinks and start .. stop.
        sequence = sequence_of_tile(cuda.blockIdx.x, query_start, group, shift)
        first_query = query_start[sequence]
        num_queries = int32(query_start[sequence + 1] - first_query)
        first_row = int32((cuda.blockIdx.x - (first_query * group >> shift) - sequence) << shift)
        num_rows = int32(min(num_queries * group - first_row, block_rows))
        if num_rows <= 0:
            return  # all threads leave together
        past = int32(context_lens[sequence] - num_queries)
        stop = int32(past + divide(first_row + num_rows - 1, group) + 1)
        start = int32(max(past + divide(first_row, group) + 1 - window, num_sinks) if window > 0 else num_sinks)
        sink_stop = int32(min(num_sinks, stop))
        if thread == 0:
            sight[0], sight[1], sight[2], sight[3] = sequence, sink_stop, start, stop
        if thread < block_rows:
            index = divide(first_row + thread, group)
            end = past + index + 1 if thread < num_rows else 0
            row_token[thread] = first_query + index if thread < num_rows else -1
            row_head[thread] = kv_head * group + first_row + thread - index * group
            row_stop[thread] = end
            row_start[thread] = max(end - window, num_sinks) if window > 0 else num_sinks
        cuda.syncthreads()

        row, of_warps = int32(row_tile * TILE_ROWS + (lane >> 2)), int32(row_tile * WARPS * TILE_ROWS)
        own = int32(of_warps + warp * TILE_ROWS + (lane >> 2))
        query, weights = int32(row_tile * query_size), int32(query_words + row_tile * weight_words)
        unit, split = int32(warp % units), int32(warp // units)
        place_of_total = int32((row_tile * units + unit) * TOTALS * WARP + lane)
        if whole and split == 0:
            for i in range(TOTALS):
                total[place_of_total + i * WARP] = float32(0) if i < SUMS + 2 else NOTHING
        row_scale, prepared = scale, int32(-1)
        part = int32(-1 if whole else cuda.blockIdx.z - 1)
        while whole or part < cuda.blockIdx.z:
            part = int32(part + 1)
            first = int32(part * PART)
            sequence, sink_stop, start, stop = sight[0], sight[1], sight[2], sight[3]
            if first >= stop:
                break
            low, high = seen_span(first, sink_stop, start, stop)
            if low >= high:
                continue
            if whole:
                cuda.syncthreads()  # what the last part left has been read
            seen = sequence, sink_stop, start, stop
            locate_tokens(rows, first, seen, block_tables, block_size, kv_head, num_kv_heads)
            first_step, last_step = steps_of(warp, low, high)
            for step in range(first_step, last_step):
                put(shared, weights, step, (NOTHING, NOTHING, NOTHING, NOTHING), lane)

            largest = NOTHING
            for source in range(first_source, 2):  # the sinks, which have a query of their own, and the others
                of_sinks = has_sinks and source == 0
                source_start = int32(max((0 if of_sinks else start) - first, 0))
                source_stop = int32(min((sink_stop if of_sinks else stop) - first, PART))
                if source_start >= source_stop:
                    continue
                if prepared != source:
                    if prepared >= 0:
                        cuda.syncthreads()  # the other query has been read
                    if of_sinks:
                        factor = prepare(shared, query, sink_q, row_token[row], row_head[row], warp, lane)
                    else:
                        factor = prepare(shared, query, q, row_token[row], row_head[row], warp, lane)
                    row_scale, prepared = multiply(scale, factor), int32(source)
                cuda.syncthreads()  # the rows and the query are there
                source_steps = steps_of(warp, source_start, source_stop)
                span = (
                    int32((0 if of_sinks else row_start[row]) - first),
                    int32((min(sink_stop, row_stop[row]) if of_sinks else row_stop[row]) - first),
                )
                of_source = score_steps(
                    shared, query, weights, keys, rows, source_steps, span, row_scale, soft_cap, lane
                )
                largest = max(largest, of_source)

            largest = quad_max(largest)
            if lane & 3 == 0:
                warp_largest[own] = largest
            cuda.syncthreads()
            base = finite_base(max_of_warps(warp_largest, of_warps + (lane >> 2)))
            low, high = seen_span(first, sight[1], sight[2], sight[3])  # again, to not keep it in registers
            weight_sum = quad_sum(weigh(shared, weights, steps_of(warp, low, high), base, lane))
            if lane & 3 == 0:
                warp_sums[own] = weight_sum
            cuda.syncthreads()

            for i in range(SUMS):
                sums[i] = float32(0)
            if split < splits:
                low, high = seen_span(first, sight[1], sight[2], sight[3])
                first_step = int32(low >> 4)
                first_step = int32(first_step + (split - first_step & splits - 1))
                for step in range(first_step, int32((high + STEP - 1) >> 4), int32(splits)):
                    accumulate(sums, shared, weights, step, values, rows, step * STEP, unit, lane)
            if splits > 1:
                add_splits(sums, shared, weights, unit, split, lane)

            if split == 0:
                for which in range(2):
                    i = int32(2 * (lane & 3) + which)
                    largest, weight_sum = (
                        max_of_warps(warp_largest, of_warps + i),
                        sum_of_warps(warp_sums, of_warps + i),
                    )
                    i = int32(i + row_tile * TILE_ROWS)
                    if whole:
                        fold(total, place_of_total, sums, which, largest, weight_sum)
                    elif row_token[i] >= 0:
                        index = (row_token[i] * q.shape[1] + row_head[i]) * num_parts + part
                        dim = unit * UNIT + 8 * (lane >> 2)
                        store_dims(scratch, index * padded + dim, padded - dim, sums, which)
                        if unit == 0 and lane < 4:
                            statistics = q.shape[0] * q.shape[1] * num_parts * padded + 2 * index
                            scratch[statistics], scratch[statistics + 1] = largest, weight_sum
            if not whole:
                break  # the compiler sees that it goes through this loop once

        if whole and split == 0:
            for which in range(2):
                i = row_tile * TILE_ROWS + 2 * (lane & 3) + which
                dim = unit * UNIT + 8 * (lane >> 2)
                weight_sum = total[place_of_total + (SUMS + which) * WARP]
                if row_token[i] >= 0:
                    for k in range(8):
                        if dim + k < head_dim:
                            x = total[place_of_total + (2 * k + which) * WARP] + float32(0)
                            out[row_token[i], row_head[i], dim + k] = x / weight_sum

    return bounded_kernel(row_tiles * WARPS * WARP, tiles // row_tiles)(attention_kernel)
