"""Rotary positions (Su et al. 2021), and the write of K and V into their pages."""

from __future__ import annotations

import numpy as np

from ..ops import Array
from .pages import write_token


def rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
    """out = x rotated to the position min(positions, last); see :class:`minipage.kernels.ops.Ops`."""
    reached = np.minimum(positions, last)
    out[:] = x
    _rotate(out, cos[reached][:, None], sin[reached][:, None])


def rope_and_cache(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Array,
) -> None:
    """Rotate q and k in place, then write k and v to their slots; see :class:`minipage.kernels.ops.Ops`."""
    for rotated in (q, k):
        _rotate(rotated, cos[positions][:, None], sin[positions][:, None])
    for token, slot in enumerate(slots):
        if slot >= 0:
            write_token(key_cache, value_cache, int(slot), k[token], v[token])


def _rotate(x: Array, cos: Array, sin: Array) -> None:
    """Turn each pair (dim i, dim i + R/2) of x [T, heads, D] by its angle; cos and sin [T, 1, R/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin
