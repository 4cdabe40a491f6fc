"""Packed weights on a GPU: rows one after the other, and how a kernel reads an element of each kind.

    float kinds       rows [N, K] in their own dtype
    int8              codes int8 [N, G * 32], scales float16 [N, G]
    int4              codes uint8 [N, G * 16], two inputs a byte, the even one in the low half; scales and minima float16 [N, G]
    int4_symmetric    the same without minima

with G = ceil(K / 32) groups of inputs a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32

from ..dtypes import STORAGE, convert, to_float32
from ..ops import GROUP_SIZE, WEIGHT_KINDS, Groups, PackedWeight
from ..quantization import (
    INT4_ZERO,
    check_groups,
    check_rows,
    code_dtype,
    dequantize,
    num_groups,
    quantize,
    ungroup,
    unpacked,
)
from .formats import widen
from .target import pure_function, to_device, to_host

Array = Any


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """See :meth:`kernels.ops.Ops.empty_weight`."""
    num_rows, num_inputs = shape
    if kind in STORAGE:
        return PackedWeight(kind, shape, (xp.zeros(shape, STORAGE[kind]),))
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")
    groups = num_groups(num_inputs)
    codes = xp.zeros((num_rows, groups * GROUP_SIZE // (1 if kind == "int8" else 2)), code_dtype(kind))
    per_group = [xp.zeros((num_rows, groups), np.float16) for _ in range(2 if kind == "int4" else 1)]
    return PackedWeight(kind, shape, (codes, *per_group))


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """See :meth:`kernels.ops.Ops.pack_rows`."""
    check_rows(weight, start, rows)
    if weight.kind in STORAGE:
        weight.arrays[0][start : start + len(rows)] = to_device(convert(rows, weight.kind))
    else:
        pack_groups(weight, start, quantize(to_float32(rows), weight.kind))


def pack_groups(weight: PackedWeight, start: int, groups: Groups) -> None:
    """See :meth:`kernels.ops.Ops.pack_groups`."""
    check_groups(weight, start, groups)
    codes = unpacked(groups, weight.kind).codes
    if weight.kind != "int8":
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    parts = (codes.reshape(len(codes), -1), groups.scales, groups.minima)
    for array, part in zip(weight.arrays, parts, strict=False):
        array[start : start + len(part)] = to_device(part)


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """See :meth:`kernels.ops.Ops.unpack_rows`."""
    codes, *per_group = (to_host(array[start:stop]) for array in weight.arrays)
    if weight.kind in STORAGE:
        return to_float32(codes)
    if weight.kind != "int8":
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    scales, minima = per_group[0], per_group[1] if weight.kind == "int4" else None
    groups = Groups(codes.reshape(*scales.shape, GROUP_SIZE), scales, minima)
    return ungroup(dequantize(groups, weight.kind), weight.shape[1])


@pure_function
def float_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    return widen(codes[row, column])


@pure_function
def int8_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    return float32(codes[row, column]) * widen(scales[row, column // GROUP_SIZE])


@pure_function
def int4_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    code = (codes[row, column // 2] >> (column % 2 * 4)) & 15
    group = column // GROUP_SIZE
    return float32(code) * widen(scales[row, group]) + widen(minima[row, group])


@pure_function
def int4_symmetric_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    code = (codes[row, column // 2] >> (column % 2 * 4)) & 15
    return (float32(code) - float32(INT4_ZERO)) * widen(scales[row, column // GROUP_SIZE])


#: How a kernel reads element (row, column) of each kind as float32, from the three arrays that :func:`arrays_of` gives.
ELEMENTS = dict.fromkeys(STORAGE, float_element) | {
    "int8": int8_element,
    "int4": int4_element,
    "int4_symmetric": int4_symmetric_element,
}


def arrays_of(weight: PackedWeight) -> tuple[Array, Array, Array]:
    """Codes, scales and minima; where a kind has none, its last array stands in and is not read."""
    arrays = (*weight.arrays, weight.arrays[-1], weight.arrays[-1])
    return arrays[0], arrays[1], arrays[2]
