"""Rotary positions (Su et al. 2021), and the write of K and V into their pages."""

from __future__ import annotations

import numpy as np

from ..dtypes import float32_to_bfloat16
from ..ops import Array


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
    block_size = value_cache.shape[2]
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(int(slot), block_size)
            key_cache[block, :, :, offset] = narrow(k[token], key_cache.dtype)
            value_cache[block, :, offset, :] = narrow(v[token], value_cache.dtype)


def _rotate(x: Array, cos: Array, sin: Array) -> None:
    """Turn each pair (dim i, dim i + R/2) of x [T, heads, D] by its angle; cos and sin [T, 1, R/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin


def narrow(x: Array, dtype: np.dtype) -> Array:
    """float32 in the storage ``dtype``, to nearest; what is too large for float16 becomes infinite."""
    if dtype == np.uint16:
        return float32_to_bfloat16(x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)
