"""Copies of whole blocks, within a pool and between pools. Plain NumPy: they only copy."""

from __future__ import annotations

from ..ops import Array


def copy_blocks(key_cache: Array, value_cache: Array, src: Array, dst: Array) -> None:
    """Copy blocks src[i] to dst[i] in all layers of both caches [L, num_blocks, ...]."""
    swap_blocks(key_cache, key_cache, src, dst)
    swap_blocks(value_cache, value_cache, src, dst)


def swap_blocks(src_cache: Array, dst_cache: Array, src: Array, dst: Array) -> None:
    """Copy blocks src[i] of one pool to dst[i] of another, in all layers."""
    # Block by block, straight from one to the other: indexing with all of them would gather them aside first.
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        dst_cache[:, target] = src_cache[:, source]
