"""Sums of products of small integers, by the best instruction that there is. All ways give the same numbers: they are exact.

``pairs``   of int16: 8 outputs x 2 inputs at a time
``quads``   of unsigned codes 0..15 and int8: 8 outputs x 4 inputs at a time
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .. import isa
from .vector import INT, SHORT, Builder, Value, constant

_WIDE = ir.VectorType(INT, 8)
_AVX = {
    "pairs": ("llvm.x86.avx2.pmadd.wd", ir.VectorType(INT, 8)),
    "quads": ("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(SHORT, 16)),
}
_VNNI = {"pairs": "llvm.x86.avx512.vpdpwssd.256", "quads": "llvm.x86.avx512.vpdpbusd.256"}


def add_pairs(builder: Builder, total: Value, weights: Value, x: Value) -> Value:
    """total <8 x i32> + products of ``weights`` and ``x``, both <16 x i16>, summed in pairs."""
    if isa.level() == "vnni":
        return _call(builder, _VNNI["pairs"], _WIDE, [total, *_as_words(builder, x, weights)])
    if isa.level() == "avx2":
        return builder.add(total, _call(builder, *_AVX["pairs"], [weights, x]))
    return _add_in_turn(builder, total, weights, x, signed=True)


def begin_quads() -> Value:
    """What :func:`add_quads` begins with: AVX2 has no instruction that adds to int32, so it sums in int16 at first."""
    return constant(SHORT, 16, 0) if isa.level() == "avx2" else constant(INT, 8, 0)


def add_quads(builder: Builder, total: Value, codes: Value, x: Value) -> Value:
    """total + products of ``codes`` (0..15) and ``x`` (-127..127), both <32 x i8>, summed in fours.

    At most eight times between :func:`begin_quads` and :func:`end_quads`: 16 products of at most 1,905 fit an int16.
    """
    if isa.level() == "vnni":
        return _call(builder, _VNNI["quads"], _WIDE, [total, *_as_words(builder, codes, x)])
    if isa.level() == "avx2":
        return builder.add(total, _call(builder, *_AVX["quads"], [codes, x]))
    return _add_in_turn(builder, total, codes, x, signed=False)


def end_quads(builder: Builder, total: Value) -> Value:
    """The sums <8 x i32>."""
    if isa.level() == "avx2":
        return _call(builder, *_AVX["pairs"], [total, constant(SHORT, 16, 1)])
    return total


def _add_in_turn(builder: Builder, total: Value, weights: Value, x: Value, *, signed: bool) -> Value:
    """The same in LLVM's own operations, input by input."""
    count = weights.type.count // 8
    for i in range(count):
        mask = ir.Constant(ir.VectorType(INT, 8), [output * count + i for output in range(8)])
        w, factor = (builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), mask) for v in (weights, x))
        wide = builder.sext(w, _WIDE) if signed else builder.zext(w, _WIDE)
        total = builder.add(total, builder.mul(wide, builder.sext(factor, _WIDE)))
    return total


def _as_words(builder: Builder, *vectors: Value) -> list[Value]:
    return [builder.bitcast(vector, _WIDE) for vector in vectors]


def _call(builder: Builder, name: str, result: Any, args: list[Value]) -> Value:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return builder.call(function, args)
