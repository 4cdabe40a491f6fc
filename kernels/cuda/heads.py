"""Four neighbouring dims of one head, in float32 arrays [T, heads, D] that may be views of larger ones."""

from __future__ import annotations

from typing import Any

from .intrinsics import bits_float, float_bits, load16, store16
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
    a, b, c, d = load16(x, ((token * x.strides[0] + head * x.strides[1]) >> 2) + dim)
    return bits_float(a), bits_float(b), bits_float(c), bits_float(d)


@pure_function
def store4(x: Array, token: Any, head: Any, dim: Any, four: Any) -> None:
    """Write what :func:`load4` reads."""
    words = float_bits(four[0]), float_bits(four[1]), float_bits(four[2]), float_bits(four[3])
    store16(x, ((token * x.strides[0] + head * x.strides[1]) >> 2) + dim, words)
