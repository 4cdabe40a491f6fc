"""Attention, rotary positions, and the write of K and V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minipage.kernels.cuda.attention import kernel_for
from minipage.kernels.cuda.attention_merge import merge_kernel
from minipage.kernels.cuda.attention_tile import PART, TILE_ROWS, WARPS, Shape, padded_dim
from minipage.kernels.cuda.rope import rope_and_cache_plain_kernel, rope_kernels, wide_cache_kernels
from minipage.kernels.cuda.target import THREADS, blocks_for

from .specimens import F32, FLOATS, I32, I64, IDS, ROWS, SLOTS, VECTOR, Launch, Specimen, array

HEADS = array(F32, 3, "A")
NUM_HEADS, NUM_KV_HEADS = 32, 8  #: of an 8B model
CONTEXT, PROMPT = 8192, 512  #: tokens of a sequence, and of a prompt's end
PARTS = CONTEXT // PART


def specimens() -> Iterator[Specimen]:
    """Each kernel for each kind of pages that it takes."""
    for access, kernel in rope_kernels.items():
        arguments: tuple[Any, ...] = HEADS, HEADS, ROWS, ROWS, IDS, I64
        launch = Launch("1 token, 32 heads of 128", 1, 4 * 2 * NUM_HEADS * 128)
        yield Specimen(f"rope {access}", kernel, arguments, THREADS, launch, wide_loads=access == "wide")
    for kind, dtype in FLOATS.items():
        pages = array(dtype, 4)
        arguments = HEADS, HEADS, HEADS, ROWS, ROWS, IDS, pages, pages, SLOTS
        moved = 4 * 2 * NUM_HEADS + (4 + dtype.bitwidth // 8) * 2 * NUM_KV_HEADS
        launch = Launch("1 token, 32 and 8 heads of 128", 1, moved * 128)
        wide = f"rope_and_cache {kind}", wide_cache_kernels[kind], arguments, THREADS, launch
        yield Specimen(*wide, wide_loads=True)
        yield Specimen(f"rope_and_cache {kind} plain", rope_and_cache_plain_kernel, arguments, THREADS, launch)
        for head_dim in (64, 128, 256) if kind == "float16" else (128,):
            yield _attention(kind, Shape(head_dim, 16, row_tiles=1))
        yield _attention(kind, Shape(128, 16, row_tiles=2))
    yield _attention("float16", Shape(33, 16, row_tiles=1), wide=False)
    yield _attention("float16", Shape(33, 16, row_tiles=2), wide=False)
    yield _attention("float32", Shape(256, 16, row_tiles=1))
    signature = array(F32, 3), VECTOR, IDS, IDS, I64, I64, I64, I64
    launch = Launch(f"1 token, {PARTS} parts, 32 heads of 128", NUM_HEADS, NUM_HEADS * 4 * (PARTS * 130 + 128))
    yield Specimen("paged_attention merge", merge_kernel, signature, 128, launch)


def _attention(kind: str, shape: Shape, wide: bool = True) -> Specimen:
    """The kernel for parts: of one token, or with two tiles a block of many, which are as good as read once."""
    pages, size = array(FLOATS[kind], 1), FLOATS[kind].bitwidth // 8
    numbers = F32, F32, I64, I64, I64, I64, I64
    arguments = VECTOR, HEADS, HEADS, pages, pages, array(I32, 2, "A"), IDS, IDS, *numbers
    tokens = 1 if shape.row_tiles == 1 else PROMPT
    tiles = blocks_for(tokens * NUM_HEADS // NUM_KV_HEADS, shape.row_tiles * TILE_ROWS)
    of_token = NUM_HEADS * 4 * (shape.head_dim + PARTS * (padded_dim(shape.head_dim) + 2))
    launch = Launch(
        f"{'a token' if tokens == 1 else f'{tokens} tokens'} behind {CONTEXT - tokens:,}, 32 heads of {shape.head_dim}",
        tiles * NUM_KV_HEADS * PARTS,
        2 * CONTEXT * NUM_KV_HEADS * shape.head_dim * size + tokens * of_token,
    )
    return Specimen(
        f"paged_attention {kind} {shape.head_dim} x {shape.row_tiles}",
        kernel_for(kind, wide, wide, shape),
        arguments,
        shape.row_tiles * WARPS * 32,
        launch,
        wide_loads=wide,
        tensor_cores=wide and kind != "float32",
        fills_gpu=True,
    )
