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
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...ops import Array
from ..storage import widen
from . import vector
from .vector import FLOAT, Builder, Value, long

_SPAN = 64  #: products that are added one after the other before their sum joins the total
_AT_ONCE = 4  #: products of a span that a loop has written out


def _multiply_in_python(
    rows: int, lanes: int, columns: int, accumulate: bool, x: Array, w: Array, out: Array, ahead: int
) -> None:
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
def _multiply_compiled(
    context: Any, rows: Any, lanes: Any, columns: Any, accumulate: Any, x: Any, w: Any, out: Any, ahead: Any
) -> Any:
    """What :data:`multiply` computes, as LLVM vector code; made for each combination of literals and storage in use."""
    is_panel = isinstance(columns, types.Literal)
    width = lanes.literal_value

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        x, w, out = (Matrix.of(context, builder, signature.args[i], args[i]) for i in (4, 5, 6))
        num_columns = long(columns.literal_value) if is_panel else args[2]
        with vector.count_up(builder, long(0), num_columns, width) as column:
            tile = Tile(builder, rows.literal_value, width, x, w, column, args[7], _AT_ONCE if is_panel else 1)
            tile.begin(out if accumulate.literal_value else None)
            with vector.count_up(builder, long(0), w.rows, _SPAN) as first:
                tile.add_span(first, vector.smaller(builder, builder.sub(w.rows, first), long(_SPAN)))
            tile.store(out)
        return context.get_dummy_value()

    return types.void(rows, lanes, columns, accumulate, x, w, out, types.int64), generate


#: ``multiply(rows, lanes, columns, accumulate, x, w, out, ahead)``: out[m, n] = sum over k of x[m, k] * w[k, n], each fused.
#:
#: For m < ``rows`` of x [.., >= K] and out, both float32, all k of w [K, ..] in any storage that :mod:`.vector` loads, and
#: n < ``columns``, a multiple of ``lanes``. The arrays may be strided but for their last axis. ``accumulate`` adds to what out
#: holds. ``rows``, ``lanes`` (a power of two) and ``accumulate`` must be literals; ``columns`` is one for a panel. While a row
#: of w is used, that which lies ``ahead`` bytes from it is fetched (0: nothing is).
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


class Tile:
    """Some rows by some neighbouring columns of the product: one vector a row for the total, and one for each span."""

    def __init__(
        self, builder: Builder, rows: int, lanes: int, x: Matrix, w: Matrix, column: Value, ahead: Value, at_once: int
    ) -> None:
        self._b, self._rows, self._lanes = builder, range(rows), lanes
        self._x, self._w, self._column, self._ahead, self._at_once = x, w, column, ahead, at_once
        self._zero = vector.constant(FLOAT, lanes, 0.0)
        self._totals = [cgutils.alloca_once(builder, self._zero.type) for _ in self._rows]

    def begin(self, out: Matrix | None) -> None:
        """Begin with zeros, or with what ``out`` holds."""
        b = self._b
        for m, total in enumerate(self._totals):
            first = self._zero
            if out is not None:
                first = vector.load(b, out.data, FLOAT, out.offset(b, long(m), self._column), self._lanes)
            b.store(first, total)

    def add_span(self, first: Value, length: Value) -> None:
        """Add ``length`` products from k = ``first`` on: one after the other, and their sum to the total."""
        b = self._b
        span = [cgutils.alloca_once(b, self._zero.type) for _ in self._rows]
        for total in span:
            b.store(self._zero, total)
        even = b.and_(length, long(-self._at_once))
        loops = [(long(0), even, self._at_once), (even, length, 1)] if self._at_once > 1 else [(long(0), length, 1)]
        for start, stop, step in loops:
            with vector.count_up(b, start, stop, step) as i:
                self._fetch(b.add(first, i), step)
                for k in (b.add(b.add(first, i), long(j)) for j in range(step)):
                    self._add_products(k, span)
        for total, part in zip(self._totals, span, strict=True):
            b.store(b.fadd(b.load(total), b.load(part)), total)

    def _fetch(self, k: Value, count: int) -> None:
        """Fetch what lies ahead of ``count`` rows from k on; in a panel they are one stream."""
        b, w = self._b, self._w
        size = w.dtype.bitwidth // 8
        if not _is_zero(self._ahead):
            row = b.gep(w.data, [w.offset(b, k, self._column)])
            for line in range(0, count * self._lanes * size, 64):
                vector.prefetch(b, row, b.add(self._ahead, long(line)))

    def _add_products(self, k: Value, span: list[Value]) -> None:
        b, w = self._b, self._w
        weights = vector.load_as_float32(b, w.dtype, w.data, w.offset(b, k, self._column), self._lanes)
        for m, total in enumerate(span):
            scalar = vector.load(b, self._x.data, FLOAT, self._x.offset(b, long(m), k))
            factor = vector.splat(b, scalar, self._lanes)
            b.store(vector.fused_multiply_add(b, factor, weights, b.load(total)), total)

    def store(self, out: Matrix) -> None:
        """Write the tile to the first rows of ``out``."""
        b = self._b
        for m, total in enumerate(self._totals):
            vector.store(b, b.load(total), out.data, out.offset(b, long(m), self._column))


def _is_zero(value: Value) -> bool:
    return isinstance(value, ir.Constant) and value.constant == 0
