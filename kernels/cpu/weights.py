"""Packed weights of the CPU: panels of 16 outputs side by side, so that a vector lane is an output.

Float kinds: one array [P, K, 16] of P = ceil(N / 16) panels, in the dtype by which Numba knows the storage. Quantised kinds:
one array [P, G, bytes] of records (see :mod:`.records`). Either way a panel is one stream of memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..dtypes import STORAGE, convert, to_float32
from ..ops import GROUP_SIZE, WEIGHT_KINDS, Array, Groups, PackedWeight
from ..quantization import (
    GROUP_KINDS,
    check_groups,
    check_rows,
    code_dtype,
    dequantize,
    num_groups,
    packed,
    quantize,
    ungroup,
    unpacked,
)
from .kernel import Kernel
from .records import PANEL, RECORD_BYTES, unpack_panel
from .storage import as_numba, widen
from .team import call

_CHUNK = 16 * PANEL  #: rows that are converted at once: large enough to be fast, small beside the weight


def empty_weight(shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
    """Room for a weight of ``shape`` (N, K)."""
    num_outputs, num_inputs = shape
    panels = -(-num_outputs // PANEL)
    if kind in STORAGE:
        array = as_numba(xp.zeros((panels, num_inputs, PANEL), STORAGE[kind]))
    elif kind in WEIGHT_KINDS:
        array = xp.zeros((panels, num_groups(num_inputs), RECORD_BYTES[kind]), np.uint8)
    else:
        raise ValueError(f"kind {kind!r} is not a weight kind; allowed: {', '.join(WEIGHT_KINDS)}")
    return PackedWeight(kind, shape, (array,))


def pack_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """Store or quantise ``rows`` as rows start.. of ``weight``."""
    check_rows(weight, start, rows)
    for first in range(0, len(rows), _CHUNK):
        chunk = rows[first : first + _CHUNK]
        if weight.kind in STORAGE:
            _store(weight, start + first, as_numba(convert(chunk, weight.kind)))
        else:
            pack_groups(weight, start + first, quantize(to_float32(chunk), weight.kind))


def pack_groups(weight: PackedWeight, start: int, groups: Groups) -> None:
    """Store quantised rows as rows start.. of ``weight``."""
    check_groups(weight, start, groups)
    (records,) = weight.arrays
    first, before = divmod(start, PANEL)
    after = -(start + len(groups.codes)) % PANEL
    if before or after:
        groups = _with_neighbours(weight, start, groups, before, after)
    codes, scales, minima = packed(groups, weight.kind)
    count = len(codes) // PANEL
    parts = (part.view(np.uint16) for part in (codes, scales, scales if minima is None else minima))
    call(_pack_kernel(weight.kind), records[first : first + count].view(np.uint16), *parts, units=count)


@functools.cache
def _pack_kernel(kind: str) -> Kernel:
    signature = "uint16[:, :, ::1], uint16[:, :, :], uint16[:, :], uint16[:, :]"
    return Kernel("packing:pack_of", signature, GROUP_KINDS.index(kind))


def _with_neighbours(weight: PackedWeight, start: int, groups: Groups, before: int, after: int) -> Groups:
    """The rows together with those that share their first and last panel, as these are now."""
    stop = start + len(groups.codes)
    left = _groups_of(weight, np.arange(start - before, start))
    right = _groups_of(weight, np.arange(stop, stop + after))
    parts = [
        None if part is None else np.concatenate([one, part, other])
        for one, part, other in zip(left, unpacked(groups, weight.kind), right, strict=True)
    ]
    return Groups(*parts)


def _store(weight: PackedWeight, start: int, rows: Array) -> None:
    """Rows of a float kind, as Numba knows them."""
    (panels,) = weight.arrays
    row = 0
    while row < len(rows):
        panel, lane = divmod(start + row, PANEL)
        if lane or len(rows) - row < PANEL:
            taken = min(PANEL - lane, len(rows) - row)
            panels[panel, :, lane : lane + taken] = rows[row : row + taken].T
        else:  # as many whole panels as there are
            whole = (len(rows) - row) // PANEL
            taken = whole * PANEL
            panels[panel : panel + whole] = rows[row : row + taken].reshape(whole, PANEL, -1).transpose(0, 2, 1)
        row += taken


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> Array:
    """Rows start..stop as float32 [n, K]."""
    rows = np.arange(start, stop)
    if weight.kind in STORAGE:
        (panels,) = weight.arrays
        return widen(panels[rows // PANEL, :, rows % PANEL])
    return ungroup(dequantize(_groups_of(weight, rows), weight.kind), weight.shape[1])


def _groups_of(weight: PackedWeight, rows: Array) -> Groups:
    """Quantised rows by their indices [n], in ascending order; those of the last panel's padding count too."""
    (records,) = weight.arrays
    if not len(rows):
        groups = records.shape[1]
        halves = np.empty((0, groups), np.float16)
        codes = np.empty((0, groups, GROUP_SIZE), code_dtype(weight.kind))
        return Groups(codes, halves, halves if weight.kind == "int4" else None)
    first = int(rows[0]) // PANEL
    whole = unpack_panel(weight.kind, records[first : int(rows[-1]) // PANEL + 1])
    parts = [None if part is None else part[rows - first * PANEL] for part in whole]
    return Groups(*parts)
