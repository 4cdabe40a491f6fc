"""Packed weights on a GPU: rows one after the other, and how a kernel reads an element of each kind.

    float kinds   rows [N, K] in their own dtype
    int8          codes int8 [N, G * 32], scales float32 [N, G]
    int4          codes uint8 [N, G * 16], two inputs a byte, the even one in the low half; scales and minima float32 [N, G]

with G = ceil(K / 32) groups of inputs a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32

from ..dtypes import STORAGE, convert, to_float32
from ..ops import GROUP_SIZE, WEIGHT_KINDS, PackedWeight
from ..quantization import (
    check_rows,
    dequantize_int4,
    dequantize_int8,
    num_groups,
    quantize_int4,
    quantize_int8,
    ungroup,
)
from .formats import widen
from .target import pure_function, to_device, to_host

Array = Any


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """See :meth:`kernels.ops.Ops.empty_weight`."""
    num_rows, num_inputs = shape
    groups = num_groups(num_inputs)
    if kind in STORAGE:
        return PackedWeight(kind, shape, (xp.zeros(shape, STORAGE[kind]),))
    if kind == "int8":
        codes = xp.zeros((num_rows, groups * GROUP_SIZE), np.int8)
        return PackedWeight(kind, shape, (codes, xp.zeros((num_rows, groups), np.float32)))
    if kind == "int4":
        codes = xp.zeros((num_rows, groups * GROUP_SIZE // 2), np.uint8)
        scales, minima = (xp.zeros((num_rows, groups), np.float32) for _ in range(2))
        return PackedWeight(kind, shape, (codes, scales, minima))
    raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """See :meth:`kernels.ops.Ops.pack_rows`."""
    check_rows(weight, start, rows)
    parts: tuple[Array, ...]
    if weight.kind == "int8":
        codes, scales = quantize_int8(to_float32(rows))
        parts = (codes.reshape(len(rows), -1), scales)
    elif weight.kind == "int4":
        codes, scales, minima = quantize_int4(to_float32(rows))
        parts = ((codes[..., 0::2] | codes[..., 1::2] << 4).reshape(len(rows), -1), scales, minima)
    else:
        parts = (convert(rows, weight.kind),)
    for array, part in zip(weight.arrays, parts, strict=True):
        array[start : start + len(rows)] = to_device(part)


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """See :meth:`kernels.ops.Ops.unpack_rows`."""
    parts = [to_host(array[start:stop]) for array in weight.arrays]
    if weight.kind in STORAGE:
        return to_float32(parts[0])
    num_rows, groups = parts[1].shape
    if weight.kind == "int8":
        values = dequantize_int8(parts[0].reshape(num_rows, groups, GROUP_SIZE), parts[1])
    else:
        halves = np.stack([parts[0] & 15, parts[0] >> 4], axis=-1)
        values = dequantize_int4(halves.reshape(num_rows, groups, GROUP_SIZE), parts[1], parts[2])
    return ungroup(values, weight.shape[1])


@pure_function
def float_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    return widen(codes[row, column])


@pure_function
def int8_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    return float32(codes[row, column]) * scales[row, column // GROUP_SIZE]


@pure_function
def int4_element(codes: Array, scales: Array, minima: Array, row: Any, column: Any) -> Any:
    code = (codes[row, column // 2] >> (column % 2 * 4)) & 15
    group = column // GROUP_SIZE
    return float32(code) * scales[row, group] + minima[row, group]


#: How a kernel reads element (row, column) of each kind as float32, from the three arrays that :func:`arrays_of` gives.
ELEMENTS = dict.fromkeys(STORAGE, float_element) | {"int8": int8_element, "int4": int4_element}


def arrays_of(weight: PackedWeight) -> tuple[Array, Array, Array]:
    """Codes, scales and minima; where a kind has none, its last array stands in and is not read."""
    arrays = (*weight.arrays, weight.arrays[-1], weight.arrays[-1])
    return arrays[0], arrays[1], arrays[2]
