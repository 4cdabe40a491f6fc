"""Packed weights on a GPU: layouts in which a lane's operands of tensor-core products are 16 bytes side by side.

    float kinds       rows [N, Kp] in their own dtype: plain rows, for cuBLAS reads them as well
    int8              codes words [tiles, 2U * 128], scales words [tiles, 2U * 8]
    int4              codes words [tiles, U * 128], scales and minima words [tiles, 2U * 8]
    int4_symmetric    the same without minima

with Kp = 64U, U = ceil(K / 64) steps of two groups, tiles = ceil(N / 16) of 16 rows, and words of 32 bits; all padded with
zeros. The rows of a tile are r = g + 8h, and with g in 0..7 and p in 0..3 as in
:mod:`.intrinsics`,

    int8              codes [2U, g, p, h, 2]   the eight codes 8p.. of a group of row r, a byte each
    int4 kinds        codes [U, g, p, h, 2]    of each of two groups the eight codes 8p.. of row r, four bits each, in the order
                      of NIBBLES, so that a word shifted by 4i has the codes 2i and 2i+1 at bits 0 and 16
    scales, minima    [2U, g, h]               float16, so that a word has those of rows g and g + 8
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import STORAGE, convert, to_float32
from ..ops import GROUP_SIZE, WEIGHT_KINDS, Groups, PackedWeight
from ..quantization import check_groups, check_rows, dequantize, num_groups, quantize, ungroup, unpacked
from .target import blocks_for, to_device, to_host

Array = Any

TILE = 16  #: rows of a tile
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  #: which of eight codes is where in a word, from its low bits on
STEP = 2 * GROUP_SIZE  #: inputs of a step, to which rows are padded
MOST_WORDS = 2**31 - 1  #: of codes: kernels count them in 32 bits


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """See :meth:`kernels.ops.Ops.empty_weight`."""
    num_rows, num_inputs = shape
    tiles, steps = blocks_for(num_rows, TILE), blocks_for(num_inputs, STEP)
    if kind in STORAGE:
        return PackedWeight(kind, shape, (xp.zeros((num_rows, steps * STEP), STORAGE[kind]),))
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")
    words = [256 // _groups_together(kind), *[16] * (2 if kind == "int4" else 1)]
    if tiles * steps * words[0] > MOST_WORDS:
        raise ValueError(f"shape {shape} is too large for {kind}: at most {MOST_WORDS:,} words of 4 bytes are allowed")
    return PackedWeight(kind, shape, tuple(xp.zeros((tiles, steps * count), np.uint32) for count in words))


def _groups_together(kind: str) -> int:
    """Groups of which a lane has codes in the same 16 bytes."""
    return 1 if kind == "int8" else 2


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """See :meth:`kernels.ops.Ops.pack_rows`."""
    check_rows(weight, start, rows)
    if weight.kind in STORAGE:
        weight.arrays[0][start : start + len(rows), : rows.shape[1]] = to_device(convert(rows, weight.kind))
    else:
        pack_groups(weight, start, quantize(to_float32(rows), weight.kind))


def pack_groups(weight: PackedWeight, start: int, groups: Groups) -> None:
    """See :meth:`kernels.ops.Ops.pack_groups`."""
    check_groups(weight, start, groups)
    together, missing = _groups_together(weight.kind), groups.codes.shape[1] % 2
    codes = np.pad(unpacked(groups, weight.kind).codes, ((0, 0), (0, missing), (0, 0)))
    if weight.kind != "int8":
        codes = _nibbles(codes)
    # [n, places, groups together, p, bytes] -> [n, places, p, two words]
    codes = codes.reshape(len(codes), -1, together, 4, 8 // together).swapaxes(2, 3)
    words = np.ascontiguousarray(codes).reshape(*codes.shape[:2], 4, 8).view(np.uint32)
    at = tuple(to_device(part) for part in _places(start, len(words)))
    _rows_of_codes(weight.arrays[0])[at] = to_device(words)
    for array, part in zip(weight.arrays[1:], groups[1:], strict=False):
        _rows_of_factors(array)[at] = to_device(np.pad(part, ((0, 0), (0, missing))))


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """See :meth:`kernels.ops.Ops.unpack_rows`."""
    if weight.kind in STORAGE:
        return to_float32(to_host(weight.arrays[0][start:stop])[:, : weight.shape[1]])
    first, last = start // TILE, blocks_for(stop, TILE)
    at = _places(start - first * TILE, stop - start)
    codes, *factors = (to_host(array[first:last]) for array in weight.arrays)
    together, groups = _groups_together(weight.kind), num_groups(weight.shape[1])
    words = np.ascontiguousarray(_rows_of_codes(codes)[at])  # [n, places, p, 2]
    per_lane = words.view(np.uint8).reshape(*words.shape[:2], 4, together, 8 // together).swapaxes(2, 3)
    if weight.kind == "int8":
        eights = per_lane.view(np.int8)
    else:
        eights = np.empty((*per_lane.shape[:-1], 8), np.uint8)
        eights[..., NIBBLES] = np.stack([per_lane & 15, per_lane >> 4], axis=-1).reshape(eights.shape)
    codes = eights.reshape(stop - start, words.shape[1] * together, GROUP_SIZE)[:, :groups]
    scales, minima = (*(_rows_of_factors(array)[at][:, :groups] for array in factors), None)[:2]
    return ungroup(dequantize(Groups(np.ascontiguousarray(codes), scales, minima), weight.kind), weight.shape[1])


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes [n, G, 32] of 0..15 as bytes [n, G, 16], eight codes in four bytes, in the order of NIBBLES."""
    eights = codes.reshape(*codes.shape[:2], 4, 8)[..., NIBBLES]
    packed: np.ndarray = eights[..., 0::2] | eights[..., 1::2] << np.uint8(4)
    return packed.reshape(*codes.shape[:2], GROUP_SIZE // 2)


def _places(start: int, count: int) -> tuple[Array, Array, Array]:
    """Tile, h and g of ``count`` rows from ``start`` on."""
    rows = np.arange(start, start + count)
    return rows // TILE, rows % TILE // 8, rows % 8


def _rows_of_codes(array: Array) -> Array:
    """Words of codes [tiles, places * 128] as a view [tiles, h, g, places, p, 2]."""
    return array.reshape(len(array), -1, 8, 4, 2, 2).transpose(0, 4, 2, 1, 3, 5)


def _rows_of_factors(array: Array) -> Array:
    """Words of scales or minima [tiles, groups * 8] as a float16 view [tiles, h, g, groups]."""
    return array.view(np.float16).reshape(len(array), -1, 8, 2).transpose(0, 3, 2, 1)


def arrays_of(weight: PackedWeight) -> tuple[Array, Array, Array]:
    """Codes, scales and minima; where a kind has none, its last array stands in and is not read."""
    arrays = (*weight.arrays, weight.arrays[-1], weight.arrays[-1])
    return arrays[0], arrays[1], arrays[2]
