"""Number formats: bfloat16 as uint16 bits, since NumPy has none, and conversions between the three float storages."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

#: NumPy dtype that stores each float kind.
STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def float_kind(array: Array) -> str:
    """The kind that an array's dtype stands for; ValueError for any other dtype."""
    for kind, dtype in STORAGE.items():
        if array.dtype == dtype:
            return kind
    raise ValueError(f"dtype {array.dtype} is not a float storage; allowed: float32, float16, uint16 (bfloat16 bits)")


def bfloat16_to_float32(bits: Array) -> Array:
    """uint16 bfloat16 bits -> float32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(x: Array) -> Array:
    """float32 -> uint16 bfloat16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    quiet = (bits >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return np.where(np.isnan(x), quiet, rounded)


def to_float32(array: Array) -> Array:
    """Any of the three storages as float32, exact; float32 is returned as it is."""
    kind = float_kind(array)
    if kind == "bfloat16":
        return bfloat16_to_float32(array)
    return array if kind == "float32" else array.astype(np.float32)


def convert(array: Array, kind: str) -> Array:
    """An array in any of the three storages as ``kind``, bit for bit where it is that already.

    Raises ValueError where a finite value is too large for float16.
    """
    if float_kind(array) == kind:
        return array
    x = to_float32(array)
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return float32_to_bfloat16(x)
    if kind != "float16":
        raise ValueError(f"kind {kind!r} is not a float storage; allowed: {', '.join(STORAGE)}")
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if np.any(np.isinf(half) & np.isfinite(x)):
        raise ValueError(
            f"a value of magnitude {np.abs(x[np.isfinite(x)]).max():.6g} does not fit float16 (largest 65504)"
        )
    return half
