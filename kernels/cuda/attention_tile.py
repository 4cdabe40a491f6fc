"""How paged attention is dealt out: parts of sequences, tiles of queries, and what a lane has of them.

FlashDecoding (Dao et al. 2023): parts of a sequence are computed by different thread blocks, each with a softmax of its own, and
merged by the rule of the online softmax (Milakov and Gimelshein 2018). A part is the tokens 256 i .. 256 (i + 1) of its
sequence, and its sums are taken in one order, so a query has the same bits in any chunk, batch and pool.

A tile is up to 8 rows that share a kv head: a row is a query token and one of the heads of its group. Four warps compute a part
of a tile in two steps. First each warp takes 64 of the tokens, 16 at a time: their scores, which the largest one of all warps
turns into weights. Then each takes 64 dims of the values and, where there are fewer than 256, some of the tokens.

With g = lane >> 2 and p = lane & 3, a lane has four scores of 16 tokens, those of the row g with the tokens 2 p, 2 p + 1,
2 p + 8, 2 p + 9; and then sums for the rows 2 p and 2 p + 1, of the dims 8 g .. 8 g + 7 of 64. That is how products come from
tensor cores (:mod:`.intrinsics`); other arithmetic keeps to it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numpy import float32

from .intrinsics import multiply, multiply_add
from .target import cuda, device_function, divide, int32, pure_function

Array = Any

PART = 256  #: tokens of a part
STEP = 16  #: tokens that a warp takes at once
TILE_ROWS = 8
WARPS = 4  #: that share a tile's part
STEPS = PART // STEP
WARP_STEPS = STEPS // WARPS
UNIT = 64  #: dims of the values that a warp computes
SUMS = 16  #: of a lane: 8 dims of two rows
NOTHING = float32(-math.inf)  #: the score of what is not seen


class Arithmetic(NamedTuple):
    """How products are computed; what stays in shared memory between them is its own.

    ``prepare(shared, first, q, token, head, warp, lane)`` puts the lane's row of q (none if ``token`` is negative) where
    ``score`` reads it, and returns a factor that the row's scores are to be multiplied with.
    ``score(shared, first, weights, step, keys, row, other_row, lane)`` gives the four products of 16 keys; the lane has to read
    the keys g and g + 8, at the rows ``row`` and ``other_row`` of the pages. What lies in the step's place among the weights
    is lost.
    ``put(shared, weights, step, four, lane)`` keeps four scores there, and ``get(shared, weights, step, lane)`` has them back.
    ``keep(shared, weights, step, four, lane)`` puts weights there for ``accumulate``, and returns them as rounded.
    ``accumulate(sums, shared, weights, step, values, rows, first, unit, lane)`` adds the values of 16 tokens, which lie at the
    rows ``rows[first:]`` of the pages, times their weights to the lane's sums.

    The queries of a tile begin at ``shared[first]``, its weights at ``shared[weights]``.
    """

    word: Any  #: dtype of the shared memory
    query_size: int  #: words of a tile's queries
    prepare: Any
    score: Any
    put: Any
    get: Any
    keep: Any
    accumulate: Any


class Shape(NamedTuple):
    """What a kernel is compiled for, besides its arithmetic."""

    head_dim: int
    block_size: int
    row_tiles: int  #: tiles of a block: 1, or 2 that share what they read


def padded_dim(head_dim: int) -> int:
    """Floats that a row of a part's sums takes in the scratch: a multiple of 16 bytes."""
    return -(-head_dim // 4) * 4


@pure_function
def parts_of(num_tokens: Any) -> Any:
    """Parts that hold so many tokens."""
    return divide(num_tokens + PART - 1, PART)


@device_function
def sequence_of_tile(tile: Any, query_start: Array, group: Any, shift: Any) -> Any:
    """The sequence of a block's rows: sequence s has those from (query_start[s] * group >> shift) + s on.

    That is as many blocks of 1 << shift rows as it needs for its queries, and sometimes one more.
    """
    count, thread, num_threads = 0, cuda.threadIdx.x, cuda.blockDim.x
    for first in range(0, query_start.shape[0] - 1, num_threads):
        s = first + thread
        begins = s < query_start.shape[0] - 1 and (query_start[s] * group >> shift) + s <= tile
        count += cuda.syncthreads_count(1 if begins else 0)
    return int32(count - 1)


@pure_function
def max_of_warps(of_warps: Array, first: Any) -> Any:
    """The largest of what the warps of a tile found for a row."""
    a, b = max(of_warps[first], of_warps[first + TILE_ROWS]), of_warps[first + 2 * TILE_ROWS]
    return max(a, max(b, of_warps[first + 3 * TILE_ROWS]))


@pure_function
def sum_of_warps(of_warps: Array, first: Any) -> Any:
    """The sum of what the warps of a tile found for a row."""
    a, b = of_warps[first] + of_warps[first + TILE_ROWS], of_warps[first + 2 * TILE_ROWS]
    return a + b + of_warps[first + 3 * TILE_ROWS]


@pure_function
def finite_base(largest: Any) -> Any:
    """What to subtract from scores: where all are -inf, 0, since -inf - -inf is NaN."""
    return largest if largest != NOTHING else float32(0)


@pure_function
def capped(x: Any, soft_cap: Any) -> Any:
    """The score that a cap makes of x, a score divided by it."""
    return multiply(soft_cap, math.tanh(x))


@pure_function
def merged(old: Any, keep: Any, new: Any, take: Any) -> Any:
    """old * keep + new * take, in one way for all kernels."""
    return multiply_add(old, keep, multiply(new, take))
