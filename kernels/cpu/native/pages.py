"""Blocks of K and V: keys [D, B] and values [B, D], K transposed so that the scores of a block's tokens are one vector.

int8 blocks carry the scale of each token and head with them: keys [D + 4, B], of which the last four rows are B float32, and
values [B, D + 4], where a token's row ends with its own.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from ...ops import Array
from . import vector
from .activations import code_of, magnitude_of
from .share import inner
from .storage import narrow

_INT8_MAX = np.float32(127)


# ---- scales ------------------------------------------------------------------------------------------------------------


def scale_keys(page: Array, scores: Array, head_dim: int, block_size: int) -> None:
    """Multiply scores [rows, B] by the scales of the keys, where there are any."""
    if page.dtype == np.int8:
        _scale_keys(page, scores, head_dim, block_size)


def scale_values(page: Array, weights: Array, head_dim: int, block_size: int) -> None:
    """Multiply weights [rows, B] by the scales of the values, where there are any."""
    if page.dtype == np.int8:
        _scale_values(page, weights, head_dim, block_size)


def _nothing(page: Any, scores: Any, head_dim: Any, block_size: Any) -> None:
    return None


def _scale_keys(page: Array, scores: Array, head_dim: int, block_size: int) -> None:
    for row in range(len(scores)):
        for t in range(block_size):
            scores[row, t] *= read_float(page, head_dim * block_size + 4 * t)


def _scale_values(page: Array, weights: Array, head_dim: int, block_size: int) -> None:
    for row in range(len(weights)):
        for t in range(block_size):
            weights[row, t] *= read_float(page, t * (head_dim + 4) + head_dim)


@overload(scale_keys, strict=False)  # type: ignore[untyped-decorator]
def _(page: Any, scores: Any, head_dim: Any, block_size: Any) -> Any:
    return _scale_keys if page.dtype == types.int8 else _nothing


@overload(scale_values, strict=False)  # type: ignore[untyped-decorator]
def _(page: Any, weights: Any, head_dim: Any, block_size: Any) -> Any:
    return _scale_values if page.dtype == types.int8 else lambda page, weights, head_dim, block_size: None


# ---- writing -----------------------------------------------------------------------------------------------------------


def write(k: Array, v: Array, keys: Array, values: Array, offset: int) -> None:
    """Write k and v [D] of a token to a block."""
    if keys.dtype == np.int8:
        _write_codes(k, v, keys, values, offset)
    else:
        _write_floats(k, v, keys, values, offset)


def _write_floats(k: Array, v: Array, keys: Array, values: Array, offset: int) -> None:
    for d in range(len(k)):
        keys[d, offset] = narrow(k[d], keys)
        values[offset, d] = narrow(v[d], values)


def _write_codes(k: Array, v: Array, keys: Array, values: Array, offset: int) -> None:
    head_dim, block_size = len(k), len(values)
    scale, inverse = _scale(k)
    write_float(keys, head_dim * block_size + 4 * offset, scale)
    for d in range(head_dim):
        keys[d, offset] = code_of(k[d], inverse)
    scale, inverse = _scale(v)
    write_float(values, offset * (head_dim + 4) + head_dim, scale)
    for d in range(head_dim):
        values[offset, d] = code_of(v[d], inverse)


@inner
def _scale(x: Array) -> tuple[Any, Any]:
    magnitude, inverse = magnitude_of(x, _INT8_MAX)
    return magnitude / _INT8_MAX, inverse


@overload(write, strict=False)  # type: ignore[untyped-decorator]
def _(k: Any, v: Any, keys: Any, values: Any, offset: Any) -> Any:
    return _write_codes if keys.dtype == types.int8 else _write_floats


# ---- memory ------------------------------------------------------------------------------------------------------------


def _read_in_python(page: Array, offset: int) -> Any:
    return page.reshape(-1)[offset : offset + 4].view(np.float32)[0]


def _write_in_python(page: Array, offset: int, value: Any) -> None:
    page.reshape(-1)[offset : offset + 4].view(np.float32)[0] = value


def _distance_in_python(page: Array, other: Array) -> int:
    return 0


@intrinsic  # type: ignore[untyped-decorator]
def _read_compiled(context: Any, page: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_float_pointer(context, builder, signature, args))
        value.align = 1
        return value

    return types.float32(page, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _write_compiled(context: Any, page: Any, offset: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _float_pointer(context, builder, signature, args)).align = 1
        return context.get_dummy_value()

    return types.void(page, types.int64, types.float32), generate


def _float_pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), vector.FLOAT.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def _distance_compiled(context: Any, page: Any, other: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        here, there = (
            builder.ptrtoint(context.make_array(kind)(context, builder, arg).data, ir.IntType(64))
            for kind, arg in zip(signature.args, args, strict=True)
        )
        return builder.sub(there, here)

    return types.int64(page, other), generate


#: ``read_float(page, offset)`` and ``write_float(page, offset, value)``: the float32 at a byte of a contiguous int8 page.
#: ``distance(page, other)``: how many bytes behind a page another one lies.
if numba.config.DISABLE_JIT:
    read_float, write_float, distance = _read_in_python, _write_in_python, _distance_in_python
else:
    read_float, write_float, distance = _read_compiled, _write_compiled, _distance_compiled
