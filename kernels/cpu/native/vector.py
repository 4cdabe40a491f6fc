"""Vectors in LLVM's intermediate representation: what the microkernels are written with.

Plain Numba loops leave it to the compiler whether a loop becomes vector code. These few operations say so themselves.
LLVM splits a vector that is wider than the machine's registers, so the same code serves AVX2, AVX-512 and NEON.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import types

Builder = Any  #: llvmlite.ir.IRBuilder
Value = Any  #: llvmlite.ir.Value
Type = Any  #: llvmlite.ir.Type

FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ALIGNMENT = {FLOAT: 4, HALF: 2, BYTE: 1, SHORT: 2, INT: 1}  #: the words of codes lie anywhere


def long(value: int) -> Value:
    """A 64-bit constant."""
    return ir.Constant(LONG, value)


def constant(element: Type, lanes: int, value: float) -> Value:
    """A vector with a constant in every lane."""
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def splat(builder: Builder, scalar: Value, lanes: int) -> Value:
    """A vector with a scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, constant(INT, lanes, 0))


def load(builder: Builder, pointer: Value, element: Type, index: Value, lanes: int = 0) -> Value:
    """Element ``index`` behind a pointer, or ``lanes`` neighbours from there as a vector."""
    kind = ir.VectorType(element, lanes) if lanes else element
    value = builder.load(_address(builder, pointer, element, index, kind))
    value.align = _ALIGNMENT[element]
    return value


def store(builder: Builder, vector: Value, pointer: Value, index: Value) -> None:
    """Store a vector as the elements from ``index`` on behind a pointer."""
    element = vector.type.element
    builder.store(vector, _address(builder, pointer, element, index, vector.type)).align = _ALIGNMENT[element]


def prefetch(builder: Builder, pointer: Value, distance: Value, level: int = 1) -> None:
    """Ask for the memory ``distance`` bytes behind a pointer, which may be nobody's, in a ``level`` of cache (1 or 2)."""
    byte = BYTE.as_pointer()
    address = builder.bitcast(builder.gep(builder.bitcast(pointer, byte), [distance]), byte)
    function = builder.module.globals.get("llvm.prefetch.p0")
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
        function = ir.Function(builder.module, kind, "llvm.prefetch.p0")
    read, data, locality = 0, 1, 4 - level
    builder.call(function, [address, *(ir.Constant(INT, value) for value in (read, locality, data))])


def prefetch_lines(builder: Builder, pointer: Value, start: Value, count: Value, level: int) -> None:
    """Ask for the cache lines of ``count`` bytes from ``start`` on behind a pointer.

    Calls for neighbouring bytes share no line: to ask twice costs one of the few places for requests on their way.
    """
    first = builder.and_(builder.add(start, long(63)), long(-64))
    with count_up(builder, first, builder.add(start, count), 64) as line:
        prefetch(builder, pointer, line, level)


def load_as_float32(builder: Builder, dtype: Any, pointer: Value, index: Value, lanes: int) -> Value:
    """A vector of one of the storages of :mod:`.storage`, told by its Numba ``dtype``, as float32."""
    if dtype == types.float32:
        return load(builder, pointer, FLOAT, index, lanes)
    if dtype == types.int16:
        return builder.fpext(load(builder, pointer, HALF, index, lanes), ir.VectorType(FLOAT, lanes))
    if dtype == types.int8:
        return builder.sitofp(load(builder, pointer, BYTE, index, lanes), ir.VectorType(FLOAT, lanes))
    # The bits of a bfloat16 are the upper half of a float32's.
    bits = builder.zext(load(builder, pointer, SHORT, index, lanes), ir.VectorType(INT, lanes))
    return builder.bitcast(builder.shl(bits, constant(INT, lanes, 16)), ir.VectorType(FLOAT, lanes))


def fused_multiply_add(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z with one rounding, asked for by name: the compiler may not choose it in one place and not in another."""
    name = f"llvm.fma.v{z.type.count}f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(z.type, [z.type] * 3), name)
    return builder.call(function, [x, y, z])


def across(builder: Builder, operation: str, vector: Value) -> Value:
    """The "add" or "smax" (signed maximum) of all lanes of a vector of int32, where the order is no matter."""
    name = f"llvm.vector.reduce.{operation}.v{vector.type.count}i32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(INT, [vector.type]), name)
    return builder.call(function, [vector])


def smaller(builder: Builder, x: Value, y: Value) -> Value:
    """The smaller of two 64-bit integers."""
    return builder.select(builder.icmp_signed("<", x, y), x, y)


@contextmanager
def count_up(builder: Builder, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
    """A loop: yields the index, which goes from ``start`` up to ``stop`` in steps.

    LLVM is told not to unroll it. The loops here are long, and have as much work in an iteration as the machine has
    registers for; unrolled, they would only take several times longer to compile.
    """
    before, head, body, after = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(LONG)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, long(step)), builder.block)
    back = builder.branch(head)
    no_unroll = builder.module.add_metadata([ir.MetaDataString(builder.module, "llvm.loop.unroll.disable")])
    loop = ir.MDValue(builder.module, [], name=str(len(builder.module.metadata)))
    loop.operands = (loop, no_unroll)  # LLVM takes the description of a loop only if it begins with itself
    back.set_metadata("llvm.loop", loop)
    builder.position_at_end(after)


def _address(builder: Builder, pointer: Value, element: Type, index: Value, kind: Type) -> Value:
    start = builder.gep(builder.bitcast(pointer, element.as_pointer()), [index])
    return builder.bitcast(start, kind.as_pointer())
