"""The softmax of one row of scores, as vector code."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...ops import Array
from . import vector
from .exponential import exp_of
from .vector import FLOAT, INT, Builder, Value, constant, long

_LANES = 8


def _exponentials_in_python(scores: Array, scale: Any) -> tuple[Any, Any]:
    scores *= np.float32(scale)
    valid = scores[~np.isnan(scores)]
    largest = valid.max() if len(valid) else np.float32(-np.inf)
    base = np.float32(0) if largest == -np.inf else largest
    scores[:] = np.exp(scores - base)
    return base, scores.sum()


@intrinsic  # type: ignore[untyped-decorator]
def _exponentials_compiled(context: Any, scores: Any, scale: Any) -> Any:
    result = types.UniTuple(types.float32, 2)  # type: ignore[attr-defined]

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        count = builder.extract_value(array.shape, 0)
        row = _Row(builder, array.data, count, args[1])
        largest = row.scale_and_find_largest()
        return cgutils.pack_array(builder, [largest, row.exponentiate(largest)])

    return result(scores, types.float32), generate


#: ``exponentials(scores, scale) -> (base, total)``: each score [n] float32 becomes exp(score * scale - base).
#:
#: ``base`` is the largest, or 0 where all are minus infinity: their weights are 0, where exp(-inf - -inf) would be NaN.
#: A NaN stays one and makes the total NaN.
exponentials = _exponentials_in_python if numba.config.DISABLE_JIT else _exponentials_compiled


class _Row:
    """Scores in memory: whole vectors first, then the rest one by one."""

    def __init__(self, builder: Builder, data: Value, count: Value, scale: Value) -> None:
        self._b, self._data, self._count, self._scale = builder, data, count, scale
        self._whole = builder.and_(count, long(-_LANES))

    def scale_and_find_largest(self) -> Value:
        b = self._b
        largest = {}
        for lanes, start, stop in ((_LANES, long(0), self._whole), (1, self._whole, self._count)):
            largest[lanes] = cgutils.alloca_once_value(b, constant(FLOAT, lanes, -np.inf))
            b.store(constant(FLOAT, lanes, -np.inf), largest[lanes])
            with vector.count_up(b, start, stop, lanes) as t:
                score = b.fmul(vector.load(b, self._data, FLOAT, t, lanes), vector.splat(b, self._scale, lanes))
                vector.store(b, score, self._data, t)
                b.store(self._larger(score, b.load(largest[lanes])), largest[lanes])
        wide, single = b.load(largest[_LANES]), b.load(largest[1])
        top = b.extract_element(single, ir.Constant(INT, 0))
        for lane in range(_LANES):
            top = self._larger(b.extract_element(wide, ir.Constant(INT, lane)), top)
        nothing = b.fcmp_ordered("==", top, ir.Constant(FLOAT, -np.inf))
        return b.select(nothing, ir.Constant(FLOAT, 0.0), top)

    def exponentiate(self, base: Value) -> Value:
        b = self._b
        totals = {}
        for lanes, start, stop in ((_LANES, long(0), self._whole), (1, self._whole, self._count)):
            totals[lanes] = cgutils.alloca_once_value(b, constant(FLOAT, lanes, 0.0))
            b.store(constant(FLOAT, lanes, 0.0), totals[lanes])
            with vector.count_up(b, start, stop, lanes) as t:
                score = vector.load(b, self._data, FLOAT, t, lanes)
                weight = exp_of(b, b.fsub(score, vector.splat(b, base, lanes)))
                vector.store(b, weight, self._data, t)
                b.store(b.fadd(b.load(totals[lanes]), weight), totals[lanes])
        wide = b.load(totals[_LANES])
        parts = [b.extract_element(wide, ir.Constant(INT, lane)) for lane in range(_LANES)]
        while len(parts) > 1:
            parts = [b.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return b.fadd(parts[0], b.extract_element(b.load(totals[1]), ir.Constant(INT, 0)))

    def _larger(self, x: Value, y: Value) -> Value:
        """x where it is larger than y, else y: a NaN in x is passed over."""
        return self._b.select(self._b.fcmp_ordered(">", x, y), x, y)
