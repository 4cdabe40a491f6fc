"""Attention over pages with an online softmax (Milakov and Gimelshein 2018), a thread block for each query token and head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import float32

from .formats import widen
from .target import WARP, blocks_for, cuda, kernel, launch, pure_function

Array = Any

MAX_HEAD_DIM = 256  #: a thread a dim, and room for as many in shared memory


@pure_function
def sequence_of(token: Any, query_start: Array) -> Any:
    """The sequence that owns a token: the last one that starts at or before it (bisection)."""
    low, high = 0, query_start.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if query_start[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@kernel
def paged_attention_kernel(
    out: Array,
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    scale: Any,
    window: Any,
    soft_cap: Any,
    num_sinks: Any,
    sink_q: Array,
) -> None:
    query = cuda.shared.array(MAX_HEAD_DIM, float32)
    scores = cuda.shared.array(MAX_HEAD_DIM, float32)
    weights = cuda.shared.array(MAX_HEAD_DIM, float32)
    token, head, thread, num_threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
    if token >= query_start[query_start.shape[0] - 1]:
        return  # padding: no sequence owns it (all threads leave together)
    head_dim, block_size = q.shape[2], key_cache.shape[3]
    kv_head = head // (q.shape[1] // key_cache.shape[1])
    sequence = sequence_of(token, query_start)

    # The queries of a sequence are the last tokens of its context: this one sees the sinks and the tokens start..end,
    # itself the last; a sink within the window is seen once, as a sink.
    end = context_lens[sequence] - (query_start[sequence + 1] - 1 - token)
    sinks = min(num_sinks, end)
    start = max(end - window, sinks) if window > 0 else sinks

    largest = float32(-math.inf)
    weight_sum = float32(0)
    attended = float32(0)
    for part in range(2):
        first, stop = (0, sinks) if part == 0 else (start, end)
        if thread < head_dim:
            query[thread] = sink_q[token, head, thread] if part == 0 else q[token, head, thread]
        cuda.syncthreads()

        # Tiles of as many tokens as there are threads, at fixed places in the sequence: whatever the split of a prompt
        # into chunks, the sums of a query are the same ones in the same order.
        for tile in range(first // num_threads * num_threads, stop, num_threads):
            tile_first, tile_stop = max(first, tile), min(stop, tile + num_threads)

            # First, a thread a token: neighbouring threads read neighbouring tokens of a page.
            position = tile + thread
            score = float32(-math.inf)
            if tile_first <= position and position < tile_stop:
                block, offset = block_tables[sequence, position // block_size], position % block_size
                dot = float32(0)
                for dim in range(head_dim):
                    dot += query[dim] * widen(key_cache[block, kv_head, dim, offset])
                score = dot * scale
                if soft_cap > float32(0):
                    score = soft_cap * math.tanh(score / soft_cap)
            scores[thread] = score
            cuda.syncthreads()
            old_largest = largest
            for i in range(tile_first - tile, tile_stop - tile):
                largest = max(largest, scores[i])
            # Where all scores so far are -inf, weights of 0: exp(-inf - -inf) would be NaN.
            base = largest if largest != float32(-math.inf) else float32(0)
            weights[thread] = math.exp(score - base)
            cuda.syncthreads()

            # Then, a thread a dim: neighbouring threads read neighbouring dims of a token.
            shrink = math.exp(old_largest - base)
            weight_sum *= shrink
            attended *= shrink
            for position in range(tile_first, tile_stop):
                weight = weights[position - tile]
                weight_sum += weight
                if thread < head_dim:
                    block, offset = block_tables[sequence, position // block_size], position % block_size
                    attended += weight * widen(value_cache[block, kv_head, offset, thread])
    if thread < head_dim:
        out[token, head, thread] = attended / weight_sum


def paged_attention(
    out: Array,
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    scale: float,
    window: int,
    soft_cap: float,
    num_sinks: int = 0,
    sink_q: Array | None = None,
) -> None:
    """See :meth:`kernels.ops.Ops.paged_attention`; head sizes up to 256."""
    num_tokens, num_heads, head_dim = q.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim} is too large for the CUDA kernels; allowed: up to {MAX_HEAD_DIM}")
    threads = blocks_for(head_dim, WARP) * WARP
    sequences = block_tables, context_lens, query_start
    numbers = np.float32(scale), int(window), np.float32(soft_cap), int(num_sinks)
    arguments = out, q, key_cache, value_cache, *sequences, *numbers, q if sink_q is None else sink_q
    launch(paged_attention_kernel, (num_tokens, num_heads), threads, *arguments)
