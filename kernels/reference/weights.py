"""Packed weights of the reference: plain row-major arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import STORAGE, convert, to_float32
from ..ops import GROUP_SIZE, WEIGHT_KINDS, Array, PackedWeight
from ..quantization import (
    check_rows,
    dequantize_int4,
    dequantize_int8,
    num_groups,
    quantize_int4,
    quantize_int8,
    ungroup,
)


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """Room for a weight. Float kinds: rows [N, K]; int8: codes and scale; int4: codes, scale and minimum."""
    num_rows, num_inputs = shape
    if kind in STORAGE:
        return PackedWeight(kind, shape, (xp.zeros(shape, STORAGE[kind]),))
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")
    groups = (num_rows, num_groups(num_inputs))
    codes = xp.zeros((*groups, GROUP_SIZE), np.int8 if kind == "int8" else np.uint8)
    per_group = [xp.zeros(groups, np.float32) for _ in range(1 if kind == "int8" else 2)]
    return PackedWeight(kind, shape, (codes, *per_group))


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """Store or quantise ``rows`` as rows start.. of ``weight``."""
    check_rows(weight, start, rows)
    parts: tuple[Array, ...]
    if weight.kind == "int8":
        parts = quantize_int8(to_float32(rows))
    elif weight.kind == "int4":
        parts = quantize_int4(to_float32(rows))
    else:
        parts = (convert(rows, weight.kind),)
    for array, part in zip(weight.arrays, parts, strict=True):
        array[start : start + len(rows)] = part


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """Rows start..stop as float32 [n, K]."""
    return select_rows(weight, slice(start, stop))


def select_rows(weight: PackedWeight, rows: slice | Array) -> Array:
    """The rows of a slice or of indices [n] as float32 [n, K]."""
    parts = [array[rows] for array in weight.arrays]
    if weight.kind == "int8":
        groups = dequantize_int8(*parts)
    elif weight.kind == "int4":
        groups = dequantize_int4(*parts)
    else:
        return to_float32(parts[0])
    return ungroup(groups, weight.shape[1])
