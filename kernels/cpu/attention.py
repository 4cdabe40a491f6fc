"""PagedAttention (Kwon et al. 2023, section 4.3): attention that reads K and V where they lie, block by block.

One task is a few queries of one sequence, with all the query heads that share one kv head; each query and head is a row
of the task, and the pages are read once for all of them. A row's context is cut into chunks at fixed absolute positions
and reduced chunk by chunk with the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), so that the result of a
query has the same bits whichever other queries share its task, its step and its batch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import prange

from ..ops import Array
from .jit import Kernel, inner
from .microkernel import multiply
from .storage import NUMBA_STORAGE, as_numba

_TILE = 4  #: rows of a microkernel
_ROWS = 16  #: rows of a task, about
_CHUNK = 128  #: tokens of a chunk, about
_SERIAL = 1 << 17  #: products below which starting the threads takes longer than the work


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
    """Causal attention of every query over its sequence's pages; see :class:`minipage.kernels.ops.Ops`."""
    rows = out, q, q if sink_q is None else sink_q
    pages = as_numba(key_cache), as_numba(value_cache)
    sequences = block_tables, context_lens, query_start
    _kernel(key_cache.dtype)(*rows, *pages, *sequences, scale, window, soft_cap, num_sinks)


@functools.cache
def _kernel(dtype: np.dtype) -> Kernel:
    heads, page = "float32[:, :, :]", f"{NUMBA_STORAGE[dtype]}[:, :, :, ::1]"
    sequences = "int32[:, :], int32[::1], int32[::1]"
    numbers = "float32, int64, float32, int64"
    return Kernel(_paged_attention, f"{heads}, {heads}, {heads}, {page}, {page}, {sequences}, {numbers}", parallel=True)


def _paged_attention(
    out: Array,
    q: Array,
    sink_q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    scale: float,
    window: int,
    soft_cap: float,
    num_sinks: int,
) -> None:
    rows = Rows(out, q, sink_q)
    pages = Pages(key_cache, value_cache)
    scoring = Scoring(scale, window, soft_cap, num_sinks)
    runs = _split_queries(query_start, max(1, _ROWS // (q.shape[1] // key_cache.shape[1])))
    num_tasks = len(runs) * key_cache.shape[1]
    work = 0
    for s in range(len(context_lens)):
        work += (query_start[s + 1] - query_start[s]) * context_lens[s]
    if work * q.shape[1] * q.shape[2] < _SERIAL:
        for task in range(num_tasks):
            _attend(rows, pages, block_tables, context_lens, query_start, scoring, runs, task)
    else:
        for task in prange(num_tasks):
            # prange counts in unsigned integers, for which all would be compiled once more.
            _attend(rows, pages, block_tables, context_lens, query_start, scoring, runs, np.int64(task))


class Rows(NamedTuple):
    """The queries, as the window meets them and as the sinks do, and their results, all [T, NH, D]."""

    out: Array
    q: Array
    sink_q: Array


class Pages(NamedTuple):
    """The caches of a layer: keys [num_blocks, KVH, D, B] and values [num_blocks, KVH, B, D]."""

    keys: Array
    values: Array


class Scoring(NamedTuple):
    """What is done to a score before the softmax, how far back a token sees, and how many of the first tokens it sees."""

    scale: float
    window: int
    soft_cap: float
    num_sinks: int


@inner
def _split_queries(query_start: Array, length: int) -> Array:
    """Cut the queries of each sequence into runs of up to ``length``: [num_runs, 3] of (sequence, first, last + 1)."""
    num_runs = 0
    for s in range(len(query_start) - 1):
        num_runs += (query_start[s + 1] - query_start[s] + length - 1) // length
    runs = np.empty((num_runs, 3), np.int64)
    run = 0
    for s in range(len(query_start) - 1):
        for first in range(query_start[s], query_start[s + 1], length):
            runs[run, 0], runs[run, 1], runs[run, 2] = s, first, min(first + length, query_start[s + 1])
            run += 1
    return runs


@inner
def _attend(
    rows: Rows,
    pages: Pages,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    scoring: Scoring,
    runs: Array,
    task: int | np.int64,
) -> None:
    """One task: a run of queries, for the query heads of one kv head."""
    kv_head, run = task // len(runs), task % len(runs)
    # Late queries see more. Each thread takes a row of tasks, so let early and late ones take turns.
    run = len(runs) - 1 - run // 2 if run % 2 else run // 2
    sequence, first, end = runs[run]
    table = block_tables[sequence]
    # The queries of the sequence are the last tokens of its context.
    first_position = context_lens[sequence] - (query_start[sequence + 1] - first)

    group = rows.q.shape[1] // pages.keys.shape[1]
    num_rows = (end - first) * group
    padded = (num_rows + _TILE - 1) // _TILE * _TILE
    head_dim = pages.keys.shape[2]

    queries = np.zeros((padded, head_dim), np.float32)
    softmax = np.zeros((padded, 2), np.float32)  # of each row: its largest score, and the sum of its weights
    for row in range(padded):
        softmax[row, 0] = -np.inf
    sums = np.zeros((padded, head_dim), np.float32)
    seen = np.empty((padded, 2), np.int64)  # of each row: the first token that it sees, and the one after the last
    for part in range(0 if scoring.num_sinks > 0 else 1, 2):  # the sinks, and then the window
        source = rows.sink_q if part == 0 else rows.q
        for row in range(padded):
            query = min(row, num_rows - 1) // group
            stop = first_position + query + 1
            sinks = min(scoring.num_sinks, stop)
            start = max(stop - scoring.window, sinks) if scoring.window > 0 else sinks
            seen[row, 0], seen[row, 1] = (0, sinks) if part == 0 else (start, stop)
            if row < num_rows:
                for d in range(head_dim):
                    queries[row, d] = source[first + query, kv_head * group + row % group, d]
        _reduce(queries, seen, softmax, sums, num_rows, pages, kv_head, table, scoring)

    for row in range(num_rows):
        for d in range(head_dim):
            rows.out[first + row // group, kv_head * group + row % group, d] = sums[row, d] / softmax[row, 1]


@inner
def _reduce(
    queries: Array,
    seen: Array,
    softmax: Array,
    sums: Array,
    num_rows: int,
    pages: Pages,
    kv_head: int | np.int64,
    table: Array,
    scoring: Scoring,
) -> None:
    """Take the tokens that the rows see into their softmax and sums, chunk by chunk."""
    padded, block_size = len(queries), pages.keys.shape[3]
    chunk_size = max(1, _CHUNK // block_size) * block_size
    scores = np.zeros((padded, chunk_size), np.float32)
    begin, stop = seen[0, 0], seen[padded - 1, 1]
    for chunk in range(begin // chunk_size * chunk_size, stop, chunk_size):
        blocks = range(max(begin, chunk) // block_size, (min(stop, chunk + chunk_size) - 1) // block_size + 1)
        for block in blocks:
            keys = pages.keys[table[block], kv_head]
            for row in range(0, padded, _TILE):
                multiply(_TILE, block_size, False, queries[row:], keys, scores[row:, block * block_size - chunk :])
        for row in range(num_rows):
            low, high = max(seen[row, 0] - chunk, 0), min(seen[row, 1] - chunk, chunk_size)
            if low < high:
                _update_softmax(softmax[row], sums[row], scores[row, low:high], scoring)
        for block in blocks:
            values = pages.values[table[block], kv_head]
            start = block * block_size
            for row in range(0, padded, _TILE):
                _add_values(sums[row:], scores[row:, start - chunk :], values, seen[row:], start)


@inner
def _update_softmax(softmax: Array, sums: Array, scores: Array, scoring: Scoring) -> None:
    """Take more scores into a row's softmax: they become weights, relative to the largest score so far."""
    largest = softmax[0]
    for t in range(len(scores)):
        score = scores[t] * scoring.scale
        if scoring.soft_cap > 0:
            score = scoring.soft_cap * np.tanh(score / scoring.soft_cap)
        scores[t] = score
        if score > largest:
            largest = score
    if largest == -np.inf:
        largest = np.float32(0)  # nothing but -inf so far: weights of 0, where exp(-inf - -inf) would be NaN
    shrink = np.exp(softmax[0] - largest)
    total = np.float32(0)
    for t in range(len(scores)):
        scores[t] = np.exp(scores[t] - largest)
        total += scores[t]
    for d in range(len(sums)):
        sums[d] *= shrink
    softmax[0] = largest
    softmax[1] = softmax[1] * shrink + total


@inner
def _add_values(sums: Array, weights: Array, values: Array, seen: Array, start: int) -> None:
    """Add weights @ values of the block that begins at token ``start`` to the sums of a tile of rows.

    Each row takes the tokens that it sees: a slot that it does not see may hold NaN, which no weight of 0 would undo.
    """
    block_size, head_dim = values.shape
    first, end = max(seen[0, 0] - start, 0), min(seen[0, 1] - start, block_size)
    alike = True
    for row in range(1, _TILE):
        alike = alike and max(seen[row, 0] - start, 0) == first and min(seen[row, 1] - start, block_size) == end
    if alike and first < end:
        multiply(_TILE, head_dim, True, weights[:, first:], values[first:end], sums)
    if not alike:
        for row in range(_TILE):
            first, end = max(seen[row, 0] - start, 0), min(seen[row, 1] - start, block_size)
            if first < end:
                multiply(1, head_dim, True, weights[row:, first:], values[first:end], sums[row:])
