"""Attention over paged K and V; the code is in :mod:`.native.attention`."""

from __future__ import annotations

import functools

import numpy as np

from ..ops import Array
from .kernel import Kernel
from .partition import part_size, run_length
from .storage import NUMBA_STORAGE, as_numba
from .team import call, current

_PARTIAL = 1 << 14  #: entries for parts of contexts that are merged later: few rows with long contexts need them
_LENGTHS = "int32[::1], int32[::1]"


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
    team = current()
    (_, heads, head_dim), (_, kv_heads, block_size, _) = q.shape, value_cache.shape
    group = heads // kv_heads
    rows, threads = run_length(group) * group, team.num_threads
    queries, scores, sums, softmax, seen, partial = team.scratch(
        ((threads, rows, head_dim), np.float32),
        ((threads, rows, part_size(block_size)), np.float32),
        ((threads, 2, rows, head_dim), np.float32),
        ((threads, 2, rows, 2), np.float32),
        ((threads, rows, 2), np.int64),
        ((_PARTIAL, head_dim + 2), np.float32),
    )
    where = q, q if sink_q is None else sink_q, as_numba(key_cache), as_numba(value_cache), block_size, block_tables
    few_tasks = 8 * threads if threads > 1 else 0  # below that, long contexts are shared in parts
    sight = scale, window, soft_cap, num_sinks, few_tasks
    room = queries, scores, sums, softmax, seen, partial
    kernel = _kernel(key_cache.dtype, *_shape_of_code(group, block_size, head_dim))
    call(kernel, out, *where, context_lens, query_start, *sight, *room, units=len(q) * kv_heads)
    lengths = context_lens, query_start
    call(
        _MERGE, out, kv_heads, block_size, *lengths, num_sinks, few_tasks, sums, softmax, partial, units=len(q) * heads
    )


@functools.cache
def _kernel(dtype: np.dtype, *constants: int) -> Kernel:
    page = f"{NUMBA_STORAGE[dtype]}[:, :, :, ::1]"
    inputs = f"float32[:, :, :], float32[:, :, :], {page}, {page}, int64, int32[:, :], {_LENGTHS}"
    sight = "float32, int64, float32, int64, int64"
    room = "float32[:, :, ::1], float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[:, :, ::1]"
    signature = f"float32[:, :, :], {inputs}, {sight}, {room}, float32[:, ::1]"
    return Kernel("attention:paged_attention_of", signature, *constants)


def _shape_of_code(group: int, block_size: int, head_dim: int) -> tuple[int, int, int, int]:
    """Constants of the code: many or few rows at once, which divide the heads that share a kv head (they are the rows of a
    query), and lanes that divide a block and a head. Odd sizes share one slow kernel.
    """
    if head_dim % 16 or block_size % 8:
        return 4, 1, 1, 1
    rows = (6, 3) if group % 3 == 0 else (4, 1)
    return *rows, 16 if block_size % 16 == 0 else 8, 16


_ROOM = "float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, ::1]"
_MERGE = Kernel("attention:merge", f"float32[:, :, :], int64, int64, {_LENGTHS}, int64, int64, {_ROOM}")
