"""The microkernel for int8 and int4 weights, which it turns into float32 as it reads them.

A panel is 16 outputs side by side. It is kept as one record of bytes a group of 32 inputs, read as one stream:

    int8    16 float32 scales | 32 inputs x 16 outputs, a byte each
    int4    16 float32 scales | 16 float32 minima | 16 pairs of inputs x 16 outputs, the first of a pair in the low bits
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..ops import GROUP_SIZE, Array
from . import vector
from .microkernel import Matrix, Sums, fused_multiply_add
from .vector import BYTE, FLOAT, INT, Builder, Value, long

PANEL = 16  #: outputs of a panel
_PER_GROUP = PANEL * 4  #: bytes of the scales of a record, or of its minima

#: NumPy dtype of the records of each kind, by which compiled code tells them apart; and their bytes.
RECORD_DTYPE = {"int8": np.dtype(np.int8), "int4": np.dtype(np.uint8)}
RECORD_BYTES = {"int8": _PER_GROUP + GROUP_SIZE * PANEL, "int4": 2 * _PER_GROUP + GROUP_SIZE // 2 * PANEL}


def record_fields(records: Array) -> tuple[Array, ...]:
    """Views of the parts of ``records`` [..., bytes]: (codes, scales) of int8, (codes, scales, minima) of int4.

    Scales and minima are float32 [..., PANEL]; codes int8 [..., 32, PANEL], or uint8 pairs [..., 16, PANEL].
    """
    count = 1 if records.dtype == RECORD_DTYPE["int8"] else 2
    starts = range(0, count * _PER_GROUP, _PER_GROUP)
    codes = records[..., count * _PER_GROUP :]
    return (
        codes.reshape(*codes.shape[:-1], -1, PANEL),
        *(records[..., start : start + _PER_GROUP].view(np.float32) for start in starts),
    )


def pack_pairs(codes: Array) -> Array:
    """int4 codes [..., 32] as pairs [..., 16] of bytes."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def unpack_pairs(pairs: Array) -> Array:
    """The inverse of :func:`pack_pairs`."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], GROUP_SIZE)


def _multiply_in_python(rows: int, x: Array, records: Array, out: Array) -> None:
    """What :data:`multiply_quantized` computes, for reading and for NUMBA_DISABLE_JIT=1."""
    codes, scales, *minima = record_fields(records)
    total = np.zeros((rows, PANEL), np.float32)
    for g in range(len(records)):
        span = np.zeros((rows, PANEL), np.float32)
        for i in range(min(GROUP_SIZE, x.shape[1] - g * GROUP_SIZE)):
            if minima:
                w = (codes[g, i // 2] >> 4 * (i % 2) & 15).astype(np.float32) * scales[g] + minima[0][g]
            else:
                w = codes[g, i].astype(np.float32) * scales[g]
            span = fused_multiply_add(x[:rows, g * GROUP_SIZE + i, None], w, span)
        total = total + span
    out[:rows, :PANEL] = total


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_compiled(context: Any, rows: Any, x: Any, records: Any, out: Any) -> Any:
    """What :data:`multiply_quantized` computes, as LLVM vector code."""
    has_minimum = records.dtype == types.uint8
    load_codes = _load_int4 if has_minimum else _load_int8

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        x, records, out = (Matrix.of(context, builder, signature.args[i], args[i]) for i in (1, 2, 3))
        sums = Sums(builder, rows.literal_value, PANEL)
        sums.begin(builder, None, long(0))
        with vector.count_up(builder, long(0), records.rows) as group:
            record = builder.gep(records.data, [records.offset(builder, group, long(0))])
            scale = vector.load(builder, record, FLOAT, long(0), PANEL)
            minimum = vector.load(builder, record, FLOAT, long(PANEL), PANEL) if has_minimum else None
            first = builder.mul(group, long(GROUP_SIZE))
            count = vector.smaller(builder, builder.sub(x.columns, first), long(GROUP_SIZE))
            sums.begin_span(builder)  # a group is a span
            with vector.count_up(builder, long(0), count) as i:
                codes = load_codes(builder, record, i)
                # Rounded after each step, as NumPy does it: linear sees the very weights that unpack_rows gives.
                weights = builder.fmul(codes, scale)
                if minimum is not None:
                    weights = builder.fadd(weights, minimum)
                sums.add_products(builder, x, builder.add(first, i), weights)
            sums.end_span(builder)
        sums.store(builder, out, long(0))
        return context.get_dummy_value()

    return types.void(rows, x, records, out), generate


def _load_int8(builder: Builder, record: Value, i: Value) -> Value:
    """The codes of input ``i`` of a record as float32."""
    start = builder.add(long(_PER_GROUP), builder.mul(i, long(PANEL)))
    return builder.sitofp(vector.load(builder, record, BYTE, start, PANEL), ir.VectorType(FLOAT, PANEL))


def _load_int4(builder: Builder, record: Value, i: Value) -> Value:
    """The codes of input ``i`` of a record as float32."""
    start = builder.add(long(2 * _PER_GROUP), builder.mul(builder.lshr(i, long(1)), long(PANEL)))
    pairs = builder.zext(vector.load(builder, record, BYTE, start, PANEL), ir.VectorType(INT, PANEL))
    shift = builder.trunc(builder.shl(builder.and_(i, long(1)), long(2)), INT)
    codes = builder.and_(builder.lshr(pairs, vector.splat(builder, shift, PANEL)), vector.constant(INT, PANEL, 15))
    return builder.sitofp(codes, ir.VectorType(FLOAT, PANEL))


#: ``multiply_quantized(rows, x, records, out)``: out[m, n] = sum over k of x[m, k] * w[k, n], each product fused.
#:
#: For the first ``rows`` (a literal) of x [.., K] float32, the 16 outputs of the panel ``records`` [G, bytes], and
#: out [.., >= 16] float32.
multiply_quantized = _multiply_in_python if numba.config.DISABLE_JIT else _multiply_compiled
