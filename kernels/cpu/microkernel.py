"""The microkernel: a few rows by some neighbouring columns of a product, kept in registers while the inputs are summed.

This is the innermost loop of matrix multiplication in the manner of Goto and van de Geijn (2008) and BLIS (Van Zee and
van de Geijn 2015). Each vector lane is one output, so that nothing is ever summed across lanes: the products of an
output are added in one order, and its bits do not depend on how many rows or columns are computed together. They are
added in spans, whose sums are then added: of n terms none goes through n roundings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..ops import Array
from . import vector
from .storage import widen
from .vector import FLOAT, Builder, Value, long

_SPAN = 64  #: products that are added one after the other before their sum joins the total
_LANES = (16, 4, 1)  #: widths of the tiles that a row of columns is covered with


def _multiply_in_python(rows: int, columns: int, accumulate: bool, x: Array, w: Array, out: Array) -> None:
    """What :data:`multiply` computes, for reading and for NUMBA_DISABLE_JIT=1."""
    total = out[:rows, :columns] if accumulate else np.zeros((rows, columns), np.float32)
    for start in range(0, len(w), _SPAN):
        span = np.zeros((rows, columns), np.float32)
        for k in range(start, min(start + _SPAN, len(w))):
            span = fused_multiply_add(x[:rows, k, None], widen(w[k, :columns]), span)
        total = total + span
    out[:rows, :columns] = total


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of float32 with one rounding, but for very rare cases: float64 holds the product whole."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_compiled(context: Any, rows: Any, columns: Any, accumulate: Any, x: Any, w: Any, out: Any) -> Any:
    """What :data:`multiply` computes, as LLVM vector code; made for each combination of literals and storage in use."""
    widths = (columns.literal_value,) if isinstance(columns, types.Literal) else _LANES

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        num_columns = args[1]
        x, w, out = (Matrix.of(context, builder, signature.args[i], args[i]) for i in (3, 4, 5))
        start = long(0)
        for lanes in widths:
            stop = builder.and_(num_columns, long(-lanes))
            with vector.count_up(builder, start, stop, lanes) as column:
                sums = Sums(builder, rows.literal_value, lanes)
                sums.begin(builder, out if accumulate.literal_value else None, column)
                with vector.count_up(builder, long(0), w.rows, _SPAN) as first:
                    sums.begin_span(builder)
                    last = vector.smaller(builder, builder.add(first, long(_SPAN)), w.rows)
                    with vector.count_up(builder, first, last) as k:
                        offset = w.offset(builder, k, column)
                        weights = vector.load_as_float32(builder, w.dtype, w.data, offset, lanes)
                        sums.add_products(builder, x, k, weights)
                    sums.end_span(builder)
                sums.store(builder, out, column)
            start = stop
        return context.get_dummy_value()

    return types.void(rows, columns if len(widths) == 1 else types.int64, accumulate, x, w, out), generate


#: ``multiply(rows, columns, accumulate, x, w, out)``: out[m, n] = sum over k of x[m, k] * w[k, n], each product fused.
#:
#: For m < ``rows`` of x [.., >= K] and out, both float32, all k of w [K, ..] in any float storage of :mod:`.storage`, and
#: n < ``columns``. The arrays may be strided but for their last axis. ``accumulate`` adds to what out holds. ``rows``
#: and ``accumulate`` must be literals; ``columns`` may be one, a power of two that vector code is made for.
multiply = _multiply_in_python if numba.config.DISABLE_JIT else _multiply_compiled


class Matrix(NamedTuple):
    """A two-dimensional array argument, as generated code sees it."""

    dtype: Any  #: Numba type of its elements
    data: Value  #: pointer to the first
    rows: Value
    columns: Value
    stride: Value  #: elements from row to row

    @classmethod
    def of(cls, context: Any, builder: Builder, kind: Any, value: Value) -> Matrix:
        """The array ``value`` of the Numba type ``kind``."""
        array = context.make_array(kind)(context, builder, value)
        rows, columns = (builder.extract_value(array.shape, axis) for axis in (0, 1))
        stride = builder.sdiv(builder.extract_value(array.strides, 0), long(kind.dtype.bitwidth // 8))
        return cls(kind.dtype, array.data, rows, columns, stride)

    def offset(self, builder: Builder, row: Value, column: Value) -> Value:
        """How many elements behind ``data`` an element lies."""
        return builder.add(builder.mul(self.stride, row), column)


class Sums:
    """The accumulators of a tile, one vector a row for the span and one for the total; LLVM keeps them in registers."""

    def __init__(self, builder: Builder, rows: int, lanes: int) -> None:
        self._lanes = lanes
        self._zero = vector.constant(FLOAT, lanes, 0.0)
        self._rows = [cgutils.alloca_once(builder, self._zero.type) for _ in range(rows)]
        self._spans = [cgutils.alloca_once(builder, self._zero.type) for _ in range(rows)]

    def begin(self, builder: Builder, out: Matrix | None, column: Value) -> None:
        """Begin with zeros, or with what ``out`` holds from ``column`` on."""
        for m, total in enumerate(self._rows):
            first = self._zero
            if out is not None:
                first = vector.load(builder, out.data, FLOAT, out.offset(builder, long(m), column), self._lanes)
            builder.store(first, total)

    def begin_span(self, builder: Builder) -> None:
        """Begin a span with zeros."""
        for span in self._spans:
            builder.store(self._zero, span)

    def end_span(self, builder: Builder) -> None:
        """Add the span's sums to the totals."""
        for total, span in zip(self._rows, self._spans, strict=True):
            builder.store(builder.fadd(builder.load(total), builder.load(span)), total)

    def add_products(self, builder: Builder, x: Matrix, k: Value, weights: Value) -> None:
        """Add x[m, k] * ``weights`` to the span of each row m."""
        for m, total in enumerate(self._spans):
            scalar = vector.load(builder, x.data, FLOAT, x.offset(builder, long(m), k))
            factor = vector.splat(builder, scalar, self._lanes)
            builder.store(vector.fused_multiply_add(builder, factor, weights, builder.load(total)), total)

    def store(self, builder: Builder, out: Matrix, column: Value) -> None:
        """Write the tile to the first rows of ``out``, from ``column`` on."""
        for m, total in enumerate(self._rows):
            vector.store(builder, builder.load(total), out.data, out.offset(builder, long(m), column))
