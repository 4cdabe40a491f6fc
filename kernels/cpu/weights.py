"""Packed weights of the CPU: panels of 16 outputs side by side, so that a vector lane is an output.

Float kinds: one array [P, K, 16] of P = ceil(N / 16) panels, in the dtype by which Numba knows the storage. int8 and int4:
one array [P, G, bytes] of records (see :mod:`.quantized`). Either way a panel is one stream of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dtypes import STORAGE, convert, to_float32
from ..ops import WEIGHT_KINDS, Array, PackedWeight
from ..quantization import (
    check_rows,
    dequantize_int4,
    dequantize_int8,
    num_groups,
    quantize_int4,
    quantize_int8,
    ungroup,
)
from .quantized import PANEL, RECORD_BYTES, RECORD_DTYPE, pack_pairs, record_fields, unpack_pairs
from .storage import as_numba, widen

_CHUNK = 16 * PANEL  #: rows that are converted at once: large enough to be fast, small beside the weight


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """Room for a weight of ``shape`` (N, K)."""
    num_outputs, num_inputs = shape
    panels = -(-num_outputs // PANEL)
    if kind in STORAGE:
        array = as_numba(xp.zeros((panels, num_inputs, PANEL), STORAGE[kind]))
    elif kind in WEIGHT_KINDS:
        array = xp.zeros((panels, num_groups(num_inputs), RECORD_BYTES[kind]), RECORD_DTYPE[kind])
    else:
        raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")
    return PackedWeight(kind, shape, (array,))


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """Store or quantise ``rows`` as rows start.. of ``weight``."""
    check_rows(weight, start, rows)
    for first in range(0, len(rows), _CHUNK):
        _pack_chunk(weight, start + first, rows[first : first + _CHUNK])


def _pack_chunk(weight: PackedWeight, start: int, rows: Array) -> None:
    (array,) = weight.arrays
    if weight.kind in STORAGE:
        fields: tuple[Array, ...] = (array,)
        parts: tuple[Array, ...] = (as_numba(convert(rows, weight.kind)),)
    else:
        fields = record_fields(array)
        wide = to_float32(rows)
        if weight.kind == "int8":
            parts = quantize_int8(wide)
        else:
            codes, *rest = quantize_int4(wide)
            parts = (pack_pairs(codes), *rest)
    for panel, lanes, taken in _panels(start, len(rows)):
        for field, part in zip(fields, parts, strict=True):
            # The row is the first axis of what is written, and the lane, so the last, of the panel.
            field[panel, ..., lanes] = np.moveaxis(part[taken], 0, -1)


def _panels(start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
    """The panels of rows start .. start + count: for each, its lanes and the rows that go there, counted from start."""
    row = 0
    while row < count:
        panel, lane = divmod(start + row, PANEL)
        taken = min(PANEL - lane, count - row)
        yield panel, slice(lane, lane + taken), slice(row, row + taken)
        row += taken


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """Rows start..stop as float32 [n, K]."""
    return select_rows(weight, np.arange(start, stop))


def select_rows(weight: PackedWeight, rows: Array) -> Array:
    """The rows of the given indices [n] as float32 [n, K]."""
    (array,) = weight.arrays
    panels, lanes = np.divmod(rows, PANEL)
    if weight.kind in STORAGE:
        return widen(array[panels, :, lanes])
    parts = [field[panels, ..., lanes] for field in record_fields(array)]
    groups = dequantize_int8(*parts) if weight.kind == "int8" else dequantize_int4(unpack_pairs(parts[0]), *parts[1:])
    return ungroup(groups, weight.shape[1])
