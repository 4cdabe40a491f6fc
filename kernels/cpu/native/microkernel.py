"""The microkernel: a few rows by some neighbouring columns of a product, kept in registers while the inputs are summed.

This is the innermost loop of matrix multiplication in the manner of Goto and van de Geijn (2008) and BLIS (Van Zee and
van de Geijn 2015). Each vector lane is one output, so that nothing is ever summed across lanes: the products of an
output are added in one order, and its bits do not depend on how many rows or columns are computed together. They are
added in spans, whose sums are then added: of n terms none goes through n roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...ops import Array
from ..records import PANEL
from ..storage import widen
from . import vector
from .vector import FLOAT, Builder, Value, long

_SPAN = 64  #: products that are added one after the other before their sum joins the total
_AT_ONCE = 4  #: products of a span that the loop of a panel has written out


class Ahead(NamedTuple):
    """The memory that a tile fetches while it is computed: the tiles of a panel share the next panel, at an even pace.

    To read a panel takes about as long as to compute 8 rows of it. If each waited for the other, both would go at half speed.
    """

    start: int  #: bytes from the beginning of this panel to the first that are fetched
    pace: int  #: bytes for each step: a row of weights, or a group


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
    width = lanes.literal_value

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        x, w, out = (Matrix.of(context, builder, signature.args[i], args[i]) for i in (4, 5, 6))
        with vector.count_up(builder, long(0), args[2], width) as column:

            def fetch(k: Value, count: int) -> None:
                vector.prefetch(builder, builder.gep(w.data, [w.offset(builder, k, column)]), args[7])

            tile = Tile(builder, rows.literal_value, width, x, w, column, fetch)
            tile.begin(out if accumulate.literal_value else None)
            tile.add(at_once=1)
            tile.store(out)
        return context.get_dummy_value()

    return types.void(rows, lanes, columns, accumulate, x, w, out, types.int64), generate


def _multiply_panel_in_python(rows: int, x: Array, panel: Array, out: Array, ahead: Ahead) -> None:
    """What :data:`multiply_panel` computes."""
    _multiply_in_python(rows, PANEL, PANEL, False, x, panel, out, 0)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_panel_compiled(context: Any, rows: Any, x: Any, panel: Any, out: Any, ahead: Any) -> Any:
    """What :data:`multiply_panel` computes, as LLVM vector code."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        x, w, out = (Matrix.of(context, builder, signature.args[i], args[i]) for i in (1, 2, 3))
        ahead = Ahead(*(builder.extract_value(args[4], i) for i in range(2)))
        level = 1 if rows.literal_value == 6 else 2  # only a slow pace leaves the first level time for its own misses

        def fetch(k: Value, count: int) -> None:
            start = builder.add(ahead.start, builder.mul(k, ahead.pace))
            vector.prefetch_lines(builder, w.data, start, builder.mul(ahead.pace, long(count)), level)

        tile = Tile(builder, rows.literal_value, PANEL, x, w, long(0), fetch)
        tile.begin(None)
        tile.add(_AT_ONCE)
        tile.store(out)
        return context.get_dummy_value()

    return types.void(rows, x, panel, out, ahead), generate


#: ``multiply(rows, lanes, columns, accumulate, x, w, out, ahead)``: out[m, n] = sum over k of x[m, k] * w[k, n], each fused.
#:
#: For m < ``rows`` of x [.., >= K] and out, both float32, all k of w [K, ..] in any storage that :mod:`.vector` loads, and
#: n < ``columns``, a multiple of ``lanes``. The arrays may be strided but for their last axis. ``accumulate`` adds to what out
#: holds. ``rows``, ``lanes`` (a power of two) and ``accumulate`` must be literals. While a row of w is used, that which lies
#: ``ahead`` bytes from it is fetched.
#:
#: ``multiply_panel(rows, x, panel, out, ahead)``: the same for a panel [K, 16], which is one stream of memory, and the first 16
#: columns of out. ``ahead``, an :class:`Ahead`, says what is fetched meanwhile.
if numba.config.DISABLE_JIT:
    multiply, multiply_panel = _multiply_in_python, _multiply_panel_in_python
else:
    multiply, multiply_panel = _multiply_compiled, _multiply_panel_compiled


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
        self,
        builder: Builder,
        rows: int,
        lanes: int,
        x: Matrix,
        w: Matrix,
        column: Value,
        fetch: Callable[[Value, int], None],
    ) -> None:
        """``fetch(k, count)`` asks for the memory that is to be asked for while ``count`` rows of w from k on are used."""
        self._b, self._rows, self._lanes = builder, range(rows), lanes
        self._x, self._w, self._column, self._fetch = x, w, column, fetch
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

    def add(self, at_once: int) -> None:
        """Add all products, ``at_once`` of them in an iteration of the innermost loop."""
        b = self._b
        with vector.count_up(b, long(0), self._w.rows, _SPAN) as first:
            self._add_span(first, vector.smaller(b, b.sub(self._w.rows, first), long(_SPAN)), at_once)

    def _add_span(self, first: Value, length: Value, at_once: int) -> None:
        """Add ``length`` products from k = ``first`` on: one after the other, and their sum to the total."""
        b = self._b
        span = [cgutils.alloca_once(b, self._zero.type) for _ in self._rows]
        for total in span:
            b.store(self._zero, total)
        even = b.and_(length, long(-at_once))
        loops = [(long(0), even, at_once), (even, length, 1)] if at_once > 1 else [(long(0), length, 1)]
        for start, stop, step in loops:
            with vector.count_up(b, start, stop, step) as i:
                self._fetch(b.add(first, i), step)
                for k in (b.add(b.add(first, i), long(j)) for j in range(step)):
                    self._add_products(k, span)
        for total, part in zip(self._totals, span, strict=True):
            b.store(b.fadd(b.load(total), b.load(part)), total)

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
