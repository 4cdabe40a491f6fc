"""Attention, rotary positions, and the write of K and V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minipage.kernels.cuda.attention import kernel_for
from minipage.kernels.cuda.attention_merge import merge_kernel
from minipage.kernels.cuda.attention_tile import PART, WARPS, Shape
from minipage.kernels.cuda.rope import rope_and_cache_plain_kernel, rope_kernels, wide_cache_kernels
from minipage.kernels.cuda.target import THREADS

from .specimens import F32, FLOATS, I32, I64, IDS, ROWS, SLOTS, VECTOR, Launch, Specimen, array

HEADS = array(F32, 3, "A")


def specimens() -> Iterator[Specimen]:
    """Each kernel for each kind of pages that it takes."""
    for access, kernel in rope_kernels.items():
        arguments: tuple[Any, ...] = HEADS, HEADS, ROWS, ROWS, IDS, I64
        yield Specimen(f"rope {access}", kernel, arguments, THREADS, wide_loads=access == "wide")
    for kind, dtype in FLOATS.items():
        pages = array(dtype, 4)
        arguments = HEADS, HEADS, HEADS, ROWS, ROWS, IDS, pages, pages, SLOTS
        yield Specimen(f"rope_and_cache {kind}", wide_cache_kernels[kind], arguments, THREADS, wide_loads=True)
        yield Specimen(f"rope_and_cache {kind} plain", rope_and_cache_plain_kernel, arguments, THREADS)
        for head_dim in (64, 128, 256) if kind == "float16" else (128,):
            num_bytes = 2 * 8192 * 8 * head_dim * dtype.bitwidth // 8
            launch = Launch(f"1 sequence of 8,192 tokens, 32 heads of {head_dim}", 8 * 8192 // PART, num_bytes)
            yield _attention(kind, Shape(head_dim, 16, row_tiles=1), launch)
        yield _attention(kind, Shape(128, 16, row_tiles=2))
    yield _attention("float16", Shape(33, 16, row_tiles=1), wide=False)
    yield _attention("float16", Shape(33, 16, row_tiles=2), wide=False)
    yield _attention("float32", Shape(256, 16, row_tiles=1))
    numbers = I64, I64, I64, I64
    yield Specimen("paged_attention merge", merge_kernel, (array(F32, 3), VECTOR, IDS, IDS, *numbers), 128)


def _attention(kind: str, shape: Shape, launch: Launch | None = None, wide: bool = True) -> Specimen:
    pages = array(FLOATS[kind], 1)
    numbers = F32, F32, I64, I64, I64, I64, I64
    arguments = VECTOR, HEADS, HEADS, pages, pages, array(I32, 2, "A"), IDS, IDS, *numbers
    return Specimen(
        f"paged_attention {kind} {shape.head_dim} x {shape.row_tiles}",
        kernel_for(kind, wide, wide, shape),
        arguments,
        shape.row_tiles * WARPS * 32,
        wide_loads=wide,
        tensor_cores=wide and kind != "float32",
        launch=launch,
        fills_gpu=launch is not None,
    )
