"""Attention over pages: which kernels a call takes, and their launches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import float32

from ..dtypes import float_kind
from . import attention_scalar, attention_tensor
from .attention_kernels import part_kernel
from .attention_merge import merge_kernel
from .attention_tile import PART, TILE_ROWS, WARPS, Shape, padded_dim
from .heads import have_wide_heads, load4
from .target import WARP, address, blocks_for, launch, pure_function, scratch

Array = Any

MAX_HEAD_DIM = 256
LOG2_E = 1 / math.log(2)
ENOUGH_BLOCKS = 1024  #: that fill a GPU, so that blocks may take all parts of their rows
MOST_SCRATCH = 1 << 26  #: floats
MOST_ROWS = (1 << 31) - 1  #: of pages: tokens x kv heads, which kernels count in 32 bits

#: By kind of pages, whether pages and queries can be read 16 bytes at a time, and shape: those that were needed so far.
kernels: dict[tuple[str, bool, bool, Shape], Any] = {}


def kernel_for(kind: str, wide_pages: bool, wide_queries: bool, shape: Shape) -> Any:
    """The kernel for parts: on tensor cores where the pages allow it, whatever the batch."""
    key = kind, wide_pages, wide_queries, shape
    if key not in kernels:
        load_query = _query_loader(shape.head_dim, wide_queries)
        on_tensor_cores = kind != "float32" and wide_pages
        if on_tensor_cores:
            arithmetic = attention_tensor.arithmetic(kind, shape.head_dim, load_query)
        else:
            arithmetic = attention_scalar.arithmetic(shape.head_dim, wide_pages, load_query)
        kernels[key] = part_kernel(arithmetic, shape, _tiles(on_tensor_cores, wide_pages, shape))
    return kernels[key]


def _tiles(on_tensor_cores: bool, wide_pages: bool, shape: Shape) -> int:
    """Tiles that a multiprocessor is to hold at once: 8 are half of its warps, and fewer where that takes more registers."""
    if on_tensor_cores:
        return 6 if shape.whole and (shape.has_sinks or shape.head_dim > 128) else 8
    if shape.whole:
        return 6 if wide_pages and not shape.has_sinks else 4
    return 6 if shape.has_sinks else 8


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
    """See :meth:`kernels.ops.Ops.paged_attention`; head sizes up to 256."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim} is too large for the CUDA kernels; allowed: up to {MAX_HEAD_DIM}")
    keys, values = _flat(key_cache), _flat(value_cache)
    sink_q = q if sink_q is None else sink_q
    wide_pages = head_dim * keys.itemsize % 16 == 0 and not (address(keys) % 16 or address(values) % 16)
    wide_queries = have_wide_heads(q, sink_q)

    # Blocks of queries by rows, as sequence_of_tile deals them out; with enough of them, none needs to be split into parts.
    num_sequences, num_parts = len(query_start) - 1, blocks_for(block_tables.shape[1] * block_size, PART)
    rows = num_tokens * num_heads // num_kv_heads
    size = num_tokens * num_heads * num_parts * (padded_dim(head_dim) + 2)
    many = num_tokens >= 4 * num_sequences and rows // (2 * TILE_ROWS) * num_kv_heads >= ENOUGH_BLOCKS
    shape = Shape(head_dim, block_size, num_sinks > 0, many or size > MOST_SCRATCH)
    grid = rows // (shape.row_tiles * TILE_ROWS) + num_sequences, num_kv_heads, 1 if shape.whole else num_parts
    partial = scratch("attention", 1 if shape.whole else size)

    # Scores are exponents of 2, and those of a cap are divided by it first.
    numbers = np.float32(scale / soft_cap if soft_cap else scale * LOG2_E), np.float32(soft_cap * LOG2_E)
    sight, lengths = (int(window), int(num_sinks), num_parts), (context_lens, query_start)
    kernel = kernel_for(float_kind(keys), wide_pages, wide_queries, shape)
    arguments = out, partial, q, sink_q, keys, values, block_tables, *lengths, *numbers, *sight
    launch(kernel, grid, shape.row_tiles * WARPS * WARP, *arguments)
    if not shape.whole:
        threads = blocks_for(head_dim, WARP) * WARP
        launch(merge_kernel, (num_tokens, num_heads), threads, out, partial, *lengths, *sight)


def _flat(pages: Array) -> Array:
    """Pages as one row of elements."""
    if not pages.flags.c_contiguous:
        raise ValueError(
            f"pages of shape {pages.shape} and strides {pages.strides} are not contiguous; allowed: C order"
        )
    if pages.size // pages.shape[3] > MOST_ROWS:
        raise ValueError(f"pages of shape {pages.shape} have too many rows of {pages.shape[3]}; allowed: {MOST_ROWS:,}")
    return pages.reshape(-1)
