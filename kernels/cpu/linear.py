"""Linear layers and the embedding."""

from __future__ import annotations

import functools

import numpy as np

from ..dtypes import STORAGE
from ..ops import GROUP_SIZE, Array, PackedWeight
from ..quantization import GROUP_KINDS
from .kernel import Kernel
from .storage import NUMBA_STORAGE
from .team import call, current

_UNIT = 4096  #: inputs that are worth a piece of their own where they are quantised
_NO_BIAS = np.zeros(0, np.float32)
_MATRIX = "float32[:, ::1]"
_RECORDS = "uint8[:, :, ::1]"
#: dtype of the quantised inputs that a kind of weights is multiplied with, and their largest code.
_INPUT_CODES = {"int8": (np.int16, 32767), "int4": (np.int8, 127), "int4_symmetric": (np.int8, 127)}


def embed(out: Array, weight: PackedWeight, token_ids: Array) -> None:
    """out [T, H] = rows ``token_ids`` of ``weight`` (V, H)."""
    call(_embed_kernel(weight.kind), out, *weight.arrays, token_ids, units=len(out))


def linear(out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias; x is quantised first where the weight is."""
    bias = _NO_BIAS if bias is None else bias
    if weight.kind in STORAGE:
        call(_linear_kernel(weight.kind), out, x, *weight.arrays, bias, units=len(weight.arrays[0]))
        return
    dtype, largest = _INPUT_CODES[weight.kind]
    (records,) = weight.arrays
    tokens, groups = len(x), records.shape[1]
    shapes = ((tokens, groups * GROUP_SIZE), dtype), ((tokens, groups), np.float32), ((tokens, groups), np.float32)
    codes, scales, sums = current().scratch(*shapes)
    call(_quantize_kernel(weight.kind), x, codes, scales, sums, largest, units=x.size // _UNIT)
    call(_linear_kernel(weight.kind), out, codes, scales, sums, records, bias, units=len(records))


@functools.cache
def _embed_kernel(kind: str) -> Kernel:
    if kind in STORAGE:
        return Kernel("linear:embed", f"{_MATRIX}, {NUMBA_STORAGE[STORAGE[kind]]}[:, :, ::1], int32[::1]")
    return Kernel("linear:embed_of", f"{_MATRIX}, {_RECORDS}, int32[::1]", GROUP_KINDS.index(kind))


@functools.cache
def _linear_kernel(kind: str) -> Kernel:
    if kind in STORAGE:
        return Kernel("linear:linear", f"{_MATRIX}, {_MATRIX}, {NUMBA_STORAGE[STORAGE[kind]]}[:, :, ::1], float32[::1]")
    codes = np.dtype(_INPUT_CODES[kind][0]).name
    inputs = f"{codes}[:, ::1], {_MATRIX}, {_MATRIX}"
    return Kernel("linear:linear_of", f"{_MATRIX}, {inputs}, {_RECORDS}, float32[::1]", GROUP_KINDS.index(kind))


@functools.cache
def _quantize_kernel(kind: str) -> Kernel:
    codes = np.dtype(_INPUT_CODES[kind][0]).name
    return Kernel("activations:quantize", f"{_MATRIX}, {codes}[:, ::1], {_MATRIX}, {_MATRIX}, int64")
