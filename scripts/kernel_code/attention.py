"""Attention, rotary positions, and the write of K and V."""

from __future__ import annotations

from collections.abc import Iterator

from minipage.kernels.cuda.attention import paged_attention_kernel
from minipage.kernels.cuda.rope import rope_and_cache_kernel, rope_kernel
from minipage.kernels.cuda.target import THREADS

from .specimens import F32, FLOATS, I32, I64, IDS, ROWS, SLOTS, Launch, Specimen, array

HEADS = array(F32, 3, "A")


def specimens() -> Iterator[Specimen]:
    """Each kernel for each kind of pages that it takes."""
    yield Specimen("rope", rope_kernel, (HEADS, HEADS, ROWS, ROWS, IDS, I64), THREADS)
    for kind, dtype in FLOATS.items():
        pages = array(dtype, 4)
        arguments = HEADS, HEADS, HEADS, ROWS, ROWS, IDS, pages, pages, SLOTS
        yield Specimen(f"rope_and_cache {kind}", rope_and_cache_kernel, arguments, THREADS)
        sequences = array(I32, 2), IDS, IDS
        yield Specimen(
            f"paged_attention {kind}",
            paged_attention_kernel,
            (array(F32, 3), HEADS, pages, pages, *sequences, F32, I64, F32, I64, HEADS),
            128,
            launch=Launch("1 sequence of 8,192 tokens, 32 heads of 128", 32, 2 * 8192 * 8 * 128 * dtype.bitwidth // 8),
        )
