"""Copies of whole blocks, within a pool and between pools."""

from __future__ import annotations

from ..ops import Array


def copy_blocks(key_cache: Array, value_cache: Array, src: Array, dst: Array) -> None:
    """Copy blocks src[i] to dst[i] in all layers of both caches [L, num_blocks, ...]."""
    swap_blocks(key_cache, key_cache, src, dst)
    swap_blocks(value_cache, value_cache, src, dst)


def swap_blocks(src_cache: Array, dst_cache: Array, src: Array, dst: Array) -> None:
    """Copy blocks src[i] of one pool to dst[i] of another, in all layers."""
    dst_cache[:, dst] = src_cache[:, src]
