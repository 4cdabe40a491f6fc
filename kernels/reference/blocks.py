"""Copies of whole blocks, within a pool and between pools."""

from __future__ import annotations

from ..ops import Array


def copy_blocks(key_cache: Array, value_cache: Array, src: Array, dst: Array) -> None:
    """Copy blocks src[i] to dst[i] in all layers of both caches [L, num_blocks, ...]."""
    swap_blocks(key_cache, value_cache, key_cache, value_cache, src, dst)


def swap_blocks(src_keys: Array, src_values: Array, dst_keys: Array, dst_values: Array, src: Array, dst: Array) -> None:
    """Copy blocks src[i] of two pools to dst[i] of two others, in all layers."""
    for source, target in ((src_keys, dst_keys), (src_values, dst_values)):
        target[:, dst] = source[:, src]
