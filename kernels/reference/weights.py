"""Packed weights of the reference: plain row-major arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import STORAGE, convert, to_float32
from ..ops import GROUP_SIZE, WEIGHT_KINDS, Array, Groups, PackedWeight
from ..quantization import check_groups, check_rows, code_dtype, dequantize, num_groups, quantize, ungroup, unpacked


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """Room for a weight. Float kinds: rows [N, K]; quantised kinds: the arrays of :class:`~kernels.ops.Groups`."""
    num_rows, num_inputs = shape
    if kind in STORAGE:
        return PackedWeight(kind, shape, (xp.zeros(shape, STORAGE[kind]),))
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")
    groups = (num_rows, num_groups(num_inputs))
    codes = xp.zeros((*groups, GROUP_SIZE), code_dtype(kind))
    per_group = [xp.zeros(groups, np.float16) for _ in range(2 if kind == "int4" else 1)]
    return PackedWeight(kind, shape, (codes, *per_group))


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """Store or quantise ``rows`` as rows start.. of ``weight``."""
    check_rows(weight, start, rows)
    if weight.kind in STORAGE:
        weight.arrays[0][start : start + len(rows)] = convert(rows, weight.kind)
    else:
        pack_groups(weight, start, quantize(to_float32(rows), weight.kind))


def pack_groups(weight: PackedWeight, start: int, groups: Groups) -> None:
    """Store quantised rows as rows start.. of ``weight``."""
    check_groups(weight, start, groups)
    parts = [part for part in unpacked(groups, weight.kind) if part is not None]
    for array, part in zip(weight.arrays, parts, strict=True):
        array[start : start + len(part)] = part


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """Rows start..stop as float32 [n, K]."""
    return select_rows(weight, slice(start, stop))


def select_rows(weight: PackedWeight, rows: slice | Array) -> Array:
    """The rows of a slice or of indices [n] as float32 [n, K]."""
    codes, *per_group = (array[rows] for array in weight.arrays)
    if weight.kind in STORAGE:
        return to_float32(codes)
    scales, minima = per_group[0], per_group[1] if weight.kind == "int4" else None
    return ungroup(dequantize(Groups(codes, scales, minima), weight.kind), weight.shape[1])
