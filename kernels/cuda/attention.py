"""Attention over pages: which kernels a call takes, and their launches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import float32

from ..dtypes import float_kind
from ..ops import MAX_HEAD_DIM
from . import attention_scalar, attention_tensor
from .attention_kernels import part_kernel
from .attention_merge import merge_kernel
from .attention_tile import PART, TILE_ROWS, WARPS, Shape, padded_dim
from .heads import have_wide_heads, load4
from .target import WARP, address, blocks_for, launch, pure_function, scratch

Array = Any

LOG2_E = 1 / math.log(2)
ENOUGH_BLOCKS = 1024  #: that fill a GPU, so that one may take two tiles of rows
MOST_SCRATCH = 1 << 26  #: floats that parts are kept in; of how many tokens at a time, follows from it
MOST_ROWS = (1 << 31) - 1  #: of pages: tokens x kv heads, which kernels count in 32 bits

#: By kind of pages, whether pages and queries can be read 16 bytes at a time, and shape: those that were needed so far.
kernels: dict[tuple[str, bool, bool, Shape], Any] = {}


def kernel_for(kind: str, wide_pages: bool, wide_queries: bool, shape: Shape) -> Any:
    """The kernel for parts: on tensor cores where the pages allow it, whatever the batch."""
    key = kind, wide_pages, wide_queries, shape
    if key not in kernels:
        load_query = _query_loader(shape.head_dim, wide_queries)
        if kind != "float32" and wide_pages:
            arithmetic = attention_tensor.arithmetic(kind, shape.head_dim, load_query)
        else:
            arithmetic = attention_scalar.arithmetic(shape.head_dim, wide_pages, load_query)
        kernels[key] = part_kernel(arithmetic, shape)
    return kernels[key]


def _query_loader(head_dim: int, wide: bool) -> Any:
    """A function that gives 4 neighbouring dims of a query, 0 behind the last; they may be read at once if ``wide``."""

    @pure_function
    def element(q: Array, token: Any, head: Any, dim: Any) -> Any:
        return q[token, head, dim] if dim < head_dim else float32(0)

    @pure_function
    def load_wide(q: Array, token: Any, head: Any, dim: Any) -> Any:
        return load4(q, token, head, dim) if dim < head_dim else (float32(0), float32(0), float32(0), float32(0))

    @pure_function
    def load_plain(q: Array, token: Any, head: Any, dim: Any) -> Any:
        return (
            element(q, token, head, dim),
            element(q, token, head, dim + 1),
            element(q, token, head, dim + 2),
            element(q, token, head, dim + 3),
        )

    return load_wide if wide else load_plain


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
    """See :meth:`kernels.ops.Ops.paged_attention`; head sizes up to MAX_HEAD_DIM."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim} is too large for the CUDA kernels; allowed: up to {MAX_HEAD_DIM}")
    keys, values = _flat(key_cache), _flat(value_cache)
    sink_q = q if sink_q is None else sink_q
    wide_pages = head_dim * keys.itemsize % 16 == 0 and not (address(keys) % 16 or address(values) % 16)
    wide_queries = have_wide_heads(q, sink_q)

    sink_parts, table_parts = blocks_for(int(num_sinks), PART), blocks_for(block_tables.shape[1] * block_size, PART)
    group, num_sequences, num_parts = num_heads // num_kv_heads, len(query_start) - 1, sink_parts + table_parts
    row_tiles = _row_tiles(head_dim, num_tokens * group, num_sequences, num_kv_heads * num_parts)
    block_rows = row_tiles * TILE_ROWS
    token_size = num_heads * num_parts * (padded_dim(head_dim) + 2)
    most_tokens = max(min(MOST_SCRATCH // token_size, num_tokens), 1)
    partial = scratch("attention", most_tokens * token_size)

    # Scores are exponents of 2, and those of a cap are divided by it first.
    numbers = np.float32(scale / soft_cap if soft_cap else scale * LOG2_E), np.float32(soft_cap * LOG2_E)
    sight, lengths = (int(window), int(num_sinks)), (context_lens, query_start)
    kernel = kernel_for(float_kind(keys), wide_pages, wide_queries, Shape(head_dim, block_size, row_tiles))
    for first in range(0, num_tokens, most_tokens):
        last = min(first + most_tokens, num_tokens)
        # All blocks in which these tokens may have rows, as sequence_of_tile deals them out.
        first_block = first * group // block_rows
        grid = (last * group - 1) // block_rows - first_block + num_sequences, num_kv_heads, num_parts
        arguments = partial, q, sink_q, keys, values, block_tables, *lengths, *numbers, *sight, first_block, first, last
        launch(kernel, grid, row_tiles * WARPS * WARP, *arguments)
        threads = blocks_for(head_dim, WARP) * WARP
        launch(merge_kernel, (last - first, num_heads), threads, out, partial, *lengths, *sight, num_parts, first)


def _row_tiles(head_dim: int, num_rows: int, num_sequences: int, blocks_per_tile: int) -> int:
    """Two where shared memory allows it, sequences have enough rows for both, and blocks are still enough."""
    is_worth_it = (
        num_rows > TILE_ROWS * num_sequences and num_rows // (2 * TILE_ROWS) * blocks_per_tile >= ENOUGH_BLOCKS
    )
    return 2 if head_dim <= 128 and is_worth_it else 1


def _flat(pages: Array) -> Array:
    """Pages as one row of elements."""
    if not pages.flags.c_contiguous:
        raise ValueError(
            f"pages of shape {pages.shape} and strides {pages.strides} are not contiguous; allowed: C order"
        )
    if pages.size // pages.shape[3] > MOST_ROWS:
        raise ValueError(f"pages of shape {pages.shape} have too many rows of {pages.shape[3]}; allowed: {MOST_ROWS:,}")
    return pages.reshape(-1)
