"""The microkernel for quantised weights: integer products within a group of 32 inputs, floats from group to group.

The inputs are quantised as well (see :mod:`.activations`): int16 against int8 weights, int8 against the int4 kinds. A product
of a weight and an input is then (code * scale + minimum) * (x_code * x_scale), and a group adds

    sum(code * x_code) * scale * x_scale  +  minimum * x_scale * sum(x_code)
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...ops import GROUP_SIZE, Array
from ...quantization import GROUP_KINDS, INT4_ZERO
from ..records import PANEL, PER_GROUP, unpack_panel
from . import dot, vector
from .microkernel import Ahead, Matrix, fused_multiply_add
from .share import inner
from .vector import BYTE, FLOAT, HALF, INT, Builder, Value, long

INT8, INT4, INT4_SYMMETRIC = range(3)  #: places in GROUP_KINDS

_HALVES = (0, 1)  #: a panel is two vectors of 8 outputs


def _multiply_in_python(
    kind: int, rows: int, codes: Array, scales: Array, sums: Array, records: Array, out: Array, ahead: Ahead
) -> None:
    """What :data:`multiply_groups` computes, for reading and for NUMBA_DISABLE_JIT=1."""
    weights = unpack_panel(GROUP_KINDS[kind], records[None])
    total = np.zeros((rows, PANEL), np.float32)
    for g in range(len(records)):
        x = codes[:rows, g * GROUP_SIZE : (g + 1) * GROUP_SIZE].astype(np.int32)
        products = (x @ weights.codes[:, g].astype(np.int32).T).astype(np.float32)
        if kind == INT4_SYMMETRIC:
            products -= np.float32(INT4_ZERO) * sums[:rows, g, None]
        x_scale = scales[:rows, g, None]
        total = fused_multiply_add(products, weights.scales[:, g].astype(np.float32) * x_scale, total)
        if weights.minima is not None:
            minima = weights.minima[:, g].astype(np.float32)[None]
            total = fused_multiply_add(minima, x_scale * sums[:rows, g, None], total)
    out[:rows, :PANEL] = total


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_compiled(
    context: Any, kind: Any, rows: Any, codes: Any, scales: Any, sums: Any, records: Any, out: Any, ahead: Any
) -> Any:
    """What :data:`multiply_groups` computes, as LLVM vector code."""
    arguments = (kind, rows, codes, scales, sums, records, out, ahead)

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        codes, scales, sums, records, out = (
            Matrix.of(context, builder, signature.args[i], args[i]) for i in range(2, 7)
        )
        ahead = Ahead(*(builder.extract_value(args[7], i) for i in range(2)))
        tile = _Tile(builder, kind.literal_value, rows.literal_value, codes, scales, sums, records, out, ahead)
        with vector.count_up(builder, long(0), tile.records.rows) as group:
            tile.add_group(group)
        tile.store()
        return context.get_dummy_value()

    return types.void(*arguments), generate


#: ``multiply_groups(kind, rows, codes, scales, sums, records, out, ahead)``: out [rows, 16] = x @ panel.
#:
#: ``kind`` (a place in GROUP_KINDS) and ``rows`` are literals. x is quantised: codes [.., 32 G] int16 or int8, scales [.., G] and
#: sums [.., G] (of the codes) float32. records uint8 [G, bytes] are one panel, out float32 [.., >= 16]. ``ahead``, an
#: :class:`.Ahead`, says what is fetched meanwhile.
multiply_groups = _multiply_in_python if numba.config.DISABLE_JIT else _multiply_compiled


class _Tile:
    """A few rows by the 16 outputs of a panel."""

    def __init__(
        self,
        b: Builder,
        kind: int,
        rows: int,
        codes: Matrix,
        scales: Matrix,
        sums: Matrix,
        records: Matrix,
        out: Matrix,
        ahead: Ahead,
    ) -> None:
        self.b, self.kind = b, kind
        self.codes, self.scales, self.sums, self.records, self.out = codes, scales, sums, records, out
        self.ahead = ahead
        self.rows = range(rows)
        self.at_once = 4 if rows == 1 else 1  #: steps of an inner loop that are written out
        zero = vector.constant(FLOAT, 8, 0.0)
        self.totals = [[cgutils.alloca_once_value(b, zero) for _ in _HALVES] for _ in self.rows]
        for pair in self.totals:
            for total in pair:
                b.store(zero, total)

    def add_group(self, group: Value) -> None:
        """Add the products of one group of inputs."""
        b = self.b
        record = b.gep(self.records.data, [self.records.offset(b, group, long(0))])
        start = b.add(self.ahead.start, b.mul(group, self.ahead.pace))
        level = 1 if len(self.rows) == 4 else 2  # only a slow pace leaves the first level time for its own misses
        vector.prefetch_lines(b, self.records.data, start, self.ahead.pace, level)
        inputs = [
            b.gep(self.codes.data, [self.codes.offset(b, long(m), b.mul(group, long(GROUP_SIZE)))]) for m in self.rows
        ]
        products = self._int8_products(record, inputs) if self.kind == INT8 else self._int4_products(record, inputs)
        for half in _HALVES:
            scale = self._halves(record, half * 8)
            minimum = self._halves(record, PANEL + half * 8) if self.kind == INT4 else None
            for m in self.rows:
                x_scale = vector.load(b, self.scales.data, FLOAT, self.scales.offset(b, long(m), group))
                count = vector.load(b, self.sums.data, FLOAT, self.sums.offset(b, long(m), group))
                value = b.sitofp(products[m][half], ir.VectorType(FLOAT, 8))
                if self.kind == INT4_SYMMETRIC:
                    zero = b.fmul(count, ir.Constant(FLOAT, INT4_ZERO))
                    value = b.fsub(value, vector.splat(b, zero, 8))
                factor = b.fmul(scale, vector.splat(b, x_scale, 8))
                total = vector.fused_multiply_add(b, value, factor, b.load(self.totals[m][half]))
                if minimum is not None:
                    offset = vector.splat(b, b.fmul(x_scale, count), 8)
                    total = vector.fused_multiply_add(b, minimum, offset, total)
                b.store(total, self.totals[m][half])

    def _int8_products(self, record: Value, inputs: list[Value]) -> list[list[Value]]:
        b = self.b
        sums = self._sums(vector.constant(INT, 8, 0))
        # A loop, and not all at once: LLVM would reorder the additions, and run out of registers.
        with vector.count_up(b, long(0), long(GROUP_SIZE // 2), self.at_once) as first:
            for pair in (b.add(first, long(i)) for i in range(self.at_once)):
                start = b.add(b.mul(pair, long(32)), long(PER_GROUP))
                codes = [vector.load(b, record, BYTE, b.add(start, long(half * 16)), 16) for half in _HALVES]
                weights = [b.sext(code, ir.VectorType(ir.IntType(16), 16)) for code in codes]
                for m in self.rows:
                    x = self._broadcast(inputs[m], pair, 16)
                    for half in _HALVES:
                        b.store(dot.add_pairs(b, b.load(sums[m][half]), weights[half], x), sums[m][half])
        return [[b.load(total) for total in pair] for pair in sums]

    def _int4_products(self, record: Value, inputs: list[Value]) -> list[list[Value]]:
        b = self.b
        sums = self._sums(dot.begin_quads())
        start = PER_GROUP * (2 if self.kind == INT4 else 1)
        low = vector.constant(BYTE, 32, 15)
        with vector.count_up(b, long(0), long(GROUP_SIZE // 4), self.at_once) as first:
            for quad in (b.add(first, long(i)) for i in range(self.at_once)):
                both = vector.load(b, record, BYTE, b.add(b.mul(quad, long(32)), long(start)), 32)
                codes = [b.and_(both, low), b.lshr(both, vector.constant(BYTE, 32, 4))]
                for m in self.rows:
                    x = self._broadcast(inputs[m], quad, 32)
                    for half in _HALVES:
                        b.store(dot.add_quads(b, b.load(sums[m][half]), codes[half], x), sums[m][half])
        return [[dot.end_quads(b, b.load(total)) for total in pair] for pair in sums]

    def _sums(self, zero: Value) -> list[list[Value]]:
        """Variables for the sums of a group, zeros at first."""
        sums = [[cgutils.alloca_once(self.b, zero.type) for _ in _HALVES] for _ in self.rows]
        for pair in sums:
            for total in pair:
                self.b.store(zero, total)
        return sums

    def _broadcast(self, inputs: Value, word: Value, count: int) -> Value:
        """The 32 bits of input codes at ``word`` in all lanes, as ``count`` codes."""
        b = self.b
        bits = vector.load(b, inputs, INT, word)
        return b.bitcast(vector.splat(b, bits, 8), ir.VectorType(ir.IntType(256 // count), count))

    def _halves(self, record: Value, index: int) -> Value:
        """8 float16 of a record as float32."""
        return self.b.fpext(vector.load(self.b, record, HALF, long(index), 8), ir.VectorType(FLOAT, 8))

    def store(self) -> None:
        """Write the tile."""
        b = self.b
        for m in self.rows:
            for half in _HALVES:
                vector.store(
                    b, b.load(self.totals[m][half]), self.out.data, self.out.offset(b, long(m), long(half * 8))
                )


# ---- one weight --------------------------------------------------------------------------------------------------------


@inner
def decode(kind: int, record: Array, lane: int, i: int) -> Any:
    """The weight of output ``lane`` and input ``i`` of a record, rounded as NumPy does it."""
    scale = half(record, lane)
    if kind == INT8:
        return np.float32(np.int8(record[PER_GROUP + i // 2 * 32 + lane * 2 + i % 2])) * scale
    start = PER_GROUP * (2 if kind == INT4 else 1)
    both = record[start + i // 4 * 32 + lane % 8 * 4 + i % 4]
    code = np.int32(both >> 4 if lane >= 8 else both & 15)
    if kind == INT4:
        return np.float32(code) * scale + half(record, PANEL + lane)
    return np.float32(code - INT4_ZERO) * scale


def _half_in_python(record: Array, index: int) -> Any:
    return np.float32(record.view(np.float16)[index])


@intrinsic  # type: ignore[untyped-decorator]
def _half_compiled(context: Any, record: Any, index: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.fpext(vector.load(builder, data, HALF, args[1]), FLOAT)

    return types.float32(record, types.int64), generate


#: ``half(record, index)``: a float16 of a record's scales or minima as float32.
half = _half_in_python if numba.config.DISABLE_JIT else _half_compiled
