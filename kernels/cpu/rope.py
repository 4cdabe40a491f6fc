"""Rotary positions (Su et al. 2021), and the write of K and V into their pages, fused as in PagedAttention."""

from __future__ import annotations

import functools

import numpy as np

from ..ops import Array
from .kernel import Kernel
from .storage import NUMBA_STORAGE, as_numba
from .team import call

_HEADS = "float32[:, :, :]"
_TABLES = "float32[:, ::1], float32[:, ::1], int32[::1]"
_UNIT = 2048  #: elements that are worth a piece of their own
_ROPE = Kernel("rope:rope", f"{_HEADS}, {_HEADS}, {_TABLES}, int64")


def rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int) -> None:
    """out = x rotated to the position min(positions, last); see :class:`minipage.kernels.ops.Ops`."""
    call(_ROPE, out, x, cos, sin, positions, last, units=x.size // _UNIT)


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
    pages = as_numba(key_cache), as_numba(value_cache)
    call(_kernel(key_cache.dtype), q, k, v, cos, sin, positions, *pages, slots, units=q.size // _UNIT)


@functools.cache
def _kernel(dtype: np.dtype) -> Kernel:
    pages = f"{NUMBA_STORAGE[dtype]}[:, :, :, ::1]"
    signature = f"{_HEADS}, {_HEADS}, {_HEADS}, {_TABLES}, {pages}, {pages}, int64[::1]"
    return Kernel("rope:rope_and_cache", signature)
