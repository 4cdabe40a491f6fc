"""Four neighbouring dims of one head, in float32 arrays [T, heads, D] that may be views of larger ones."""

from __future__ import annotations

from typing import Any

from .intrinsics import load_floats, store_floats
from .target import address, pure_function

Array = Any


def have_wide_heads(*arrays: Array) -> bool:
    """Whether each head of each token begins at a multiple of 16 bytes and ends at one."""
    return all(_has_wide_heads(x) for x in arrays)


def _has_wide_heads(x: Array) -> bool:
    aligned = x.shape[2] % 4 == 0 and x.strides[0] % 16 == 0 and x.strides[1] % 16 == 0 and address(x) % 16 == 0
    return bool(aligned and x.strides[2] == x.itemsize)


@pure_function
def load4(x: Array, token: Any, head: Any, dim: Any) -> Any:
    """The dims ``dim`` to ``dim`` + 3, by one access: :func:`have_wide_heads`."""
    return load_floats(x, ((token * x.strides[0] + head * x.strides[1]) >> 2) + dim)


@pure_function
def store4(x: Array, token: Any, head: Any, dim: Any, four: Any) -> None:
    """Write what :func:`load4` reads."""
    store_floats(x, ((token * x.strides[0] + head * x.strides[1]) >> 2) + dim, four)
