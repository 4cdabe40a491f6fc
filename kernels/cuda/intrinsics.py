"""What a GPU can do and Numba does not name: 16-byte accesses, pairs of 16-bit floats, products of small matrices.

A word is a uint32. ``words`` are four of them, as one 16-byte access moves them. Offsets are in elements from where an array
begins, and must make an address that is a multiple of 16 bytes; arrays in shared memory need ``alignment=16`` for that.

    load16(array, offset)            words from global or shared memory
    stream16(array, offset)          the same, from global memory that nothing writes and that is read once: it takes no cache
    store16(array, offset, words)    and back
    load_floats(array, offset), store_floats(array, offset, four)   the same, of four float32
    element_at(array, offset)        the element at an offset, whatever the shape, without a look at its sign
    unpack_half(word), unpack_bfloat16(word)         the two floats of a word, the one in its low bits first
    pack_half(low, high), pack_bfloat16(low, high)   two float32 to the nearest, as a word
    float_bits(x), bits_float(word)                  the bits of a float32, and back
    permute_bytes(a, b, selector)    of the bytes 0 to 3 of a and 4 to 7 of b those that the selector's last four hex digits name
    multiply_add(x, y, z)                            x * y + z of float32, rounded once, wherever the compiler sees it
    multiply(x, y)                                   x * y of float32, never fused with an addition
    exp2(x)                                          2^x of float32, to 2 units in the last place
    hidden(n)                                        n, an int32, of which the compiler does not know that it is constant
    mma_half(c, a, b), mma_bfloat16(c, a, b)         c + a @ b on tensor cores, by a whole warp: see below
    load_matrices(array, offset), load_matrices_transposed(array, offset)   four 8x8 matrices of 16-bit elements

The product is that of ``mma.sync.m16n8k16`` (PTX ISA, warp-level matrix instructions): a [16, 16] and b [16, 8] of 16-bit
floats, c [16, 8] of float32. With g = lane // 4 and p = lane % 4, a lane holds

    a   four words: a[g, 2p:2p+2], a[g+8, 2p:2p+2], a[g, 2p+8:2p+10], a[g+8, 2p+8:2p+10]
    b   two words: b[2p:2p+2, g], b[2p+8:2p+10, g]
    c   four floats: c[g, 2p], c[g, 2p+1], c[g+8, 2p], c[g+8, 2p+1]

``load_matrices`` is ``ldmatrix.x4`` on shared memory: lane i gives the offset of row i % 8 of matrix i // 8, and gets of each
matrix the word [g, 2p:2p+2], or transposed [2p:2p+2, g].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .formats import WIDENING
from .target import SIMULATED, pure_function

WORD, SINGLE, SHORT = ir.IntType(32), ir.FloatType(), ir.IntType(16)
WORDS = ir.VectorType(WORD, 4)
BY_A_WARP = ("convergent",)  #: keeps an instruction that a whole warp runs from where only some lanes go
GLOBAL_SPACE, SHARED_SPACE = 1, 3  #: LLVM's address spaces of global and shared memory

_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_STREAM = "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0, $1, $2, $3}, [$4];"
_LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4{0}.shared.b16 {{$0, $1, $2, $3}}, [$4];"


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """The address of an array's element."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def _as_words(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, WORDS.as_pointer(getattr(pointer.type, "addrspace", 0)))


def _tuple(context: Any, builder: Any, sig: Any, values: list[Any]) -> Any:
    return context.make_tuple(builder, sig.return_type, values)


def _memory_intrinsics(types: Any, intrinsic: Callable[..., Any]) -> tuple[Any, Any, Any, Any]:
    words = types.UniTuple(types.uint32, 4)

    def load16(typingctx: Any, array: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _as_words(builder, _pointer(context, builder, sig.args[0], args[0], args[1]))
            value = builder.load(pointer, align=16)
            return _tuple(context, builder, sig, [builder.extract_element(value, WORD(i)) for i in range(4)])

        return words(array, types.int64), emit

    def stream16(typingctx: Any, array: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _pointer(context, builder, sig.args[0], args[0], args[1])
            space = pointer.type.pointee.as_pointer(GLOBAL_SPACE)
            address = builder.ptrtoint(builder.addrspacecast(pointer, space), ir.IntType(64))
            function = ir.FunctionType(ir.LiteralStructType([WORD] * 4), [address.type])
            result = builder.call(ir.InlineAsm(function, _STREAM, "=r,=r,=r,=r,l"), [address])
            return _tuple(context, builder, sig, [builder.extract_value(result, i) for i in range(4)])

        return words(array, types.int64), emit

    def store16(typingctx: Any, array: Any, offset: Any, values: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _as_words(builder, _pointer(context, builder, sig.args[0], args[0], args[1]))
            vector = ir.Constant(WORDS, ir.Undefined)
            for i in range(4):
                vector = builder.insert_element(vector, builder.extract_value(args[2], i), WORD(i))
            builder.store(vector, pointer, align=16)
            return context.get_dummy_value()

        return types.void(array, types.int64, words), emit

    def element_at(typingctx: Any, array: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(_pointer(context, builder, sig.args[0], args[0], args[1]))

        return array.dtype(array, types.int64), emit

    return intrinsic(load16), intrinsic(stream16), intrinsic(store16), intrinsic(element_at)


def _pair_intrinsics(types: Any, intrinsic: Callable[..., Any], storage: str, name: str) -> tuple[Any, Any]:
    """``unpack`` and ``pack`` of a 16-bit format, which :mod:`.formats` names by its Numba type, and PTX by ``name``."""
    widen, text = WIDENING[storage], f"cvt.rn.{name}x2.f32 $0, $2, $1;"

    def unpack(typingctx: Any, word: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            halves = args[0], builder.lshr(args[0], WORD(16))
            return _tuple(context, builder, sig, [widen(builder, builder.trunc(half, SHORT)) for half in halves])

        return types.UniTuple(types.float32, 2)(types.uint32), emit

    def pack(typingctx: Any, low: Any, high: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            function = ir.FunctionType(WORD, [SINGLE, SINGLE])
            return builder.call(ir.InlineAsm(function, text, "=r,f,f"), args)

        return types.uint32(types.float32, types.float32), emit

    return intrinsic(unpack), intrinsic(pack)


def _bit_intrinsics(types: Any, intrinsic: Callable[..., Any]) -> tuple[Any, Any, Any]:
    def float_bits(typingctx: Any, x: Any) -> Any:
        return types.uint32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], WORD)

    def bits_float(typingctx: Any, word: Any) -> Any:
        return types.float32(types.uint32), lambda context, builder, sig, args: builder.bitcast(args[0], SINGLE)

    def permute_bytes(typingctx: Any, a: Any, b: Any, selector: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            function = ir.FunctionType(WORD, [WORD] * 3)
            return builder.call(ir.InlineAsm(function, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"), args)

        return types.uint32(types.uint32, types.uint32, types.uint32), emit

    return intrinsic(float_bits), intrinsic(bits_float), intrinsic(permute_bytes)


def _multiply_add(types: Any, intrinsic: Callable[..., Any]) -> Any:
    def multiply_add(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
        single = types.float32
        return single(single, single, single), lambda context, builder, sig, args: builder.fma(*args)

    return intrinsic(multiply_add)


def _assembly(types: Any, intrinsic: Callable[..., Any], text: str, kind: str, num_operands: int) -> Any:
    """One instruction that has nothing but a result, $0, and one or two operands, all of the type that Numba names so."""
    llvm_type, register = (SINGLE, "f") if kind == "float32" else (WORD, "r")
    number = getattr(types, kind)
    signature = number(*[number] * num_operands)
    constraints = ",".join([f"={register}", *[register] * num_operands])
    function = ir.FunctionType(llvm_type, [llvm_type] * num_operands)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.call(ir.InlineAsm(function, text, constraints), args)

    def unary(typingctx: Any, x: Any) -> Any:
        return signature, emit

    def binary(typingctx: Any, x: Any, y: Any) -> Any:
        return signature, emit

    return intrinsic(unary if num_operands == 1 else binary)


def _mma_intrinsic(types: Any, intrinsic: Callable[..., Any], operand: str) -> Any:
    floats, words = types.UniTuple(types.float32, 4), types.UniTuple(types.uint32, 4)
    text, constraints = _MMA.format(operand), ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)

    def mma(typingctx: Any, c: Any, a: Any, b: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            sums, left, right = ([builder.extract_value(args[i], j) for j in range(n)] for i, n in enumerate((4, 4, 2)))
            function = ir.FunctionType(ir.LiteralStructType([SINGLE] * 4), [WORD] * 6 + [SINGLE] * 4)
            assembly = ir.InlineAsm(function, text, constraints)
            result = builder.call(assembly, [*left, *right, *sums], attrs=BY_A_WARP)
            return _tuple(context, builder, sig, [builder.extract_value(result, i) for i in range(4)])

        return floats(floats, words, types.UniTuple(types.uint32, 2)), emit

    return intrinsic(mma)


def _matrix_intrinsic(types: Any, intrinsic: Callable[..., Any], modifier: str) -> Any:
    text = _LOAD_MATRICES.format(modifier)

    def load_matrices(typingctx: Any, array: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _pointer(context, builder, sig.args[0], args[0], args[1])
            shared = builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(SHARED_SPACE))
            address = builder.ptrtoint(shared, WORD)
            function = ir.FunctionType(ir.LiteralStructType([WORD] * 4), [WORD])
            assembly = ir.InlineAsm(function, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
            result = builder.call(assembly, [address], attrs=BY_A_WARP)
            return _tuple(context, builder, sig, [builder.extract_value(result, i) for i in range(4)])

        return types.UniTuple(types.uint32, 4)(array, types.int64), emit

    return intrinsic(load_matrices)


if SIMULATED:
    from .simulated_intrinsics import (
        bits_float,
        element_at,
        exp2,
        float_bits,
        hidden,
        load16,
        load_matrices,
        load_matrices_transposed,
        mma_bfloat16,
        mma_half,
        multiply,
        multiply_add,
        pack_bfloat16,
        pack_half,
        permute_bytes,
        store16,
        stream16,
        unpack_bfloat16,
        unpack_half,
    )
else:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    load16, stream16, store16, element_at = _memory_intrinsics(types, intrinsic)
    unpack_half, pack_half = _pair_intrinsics(types, intrinsic, "float16", "f16")
    unpack_bfloat16, pack_bfloat16 = _pair_intrinsics(types, intrinsic, "uint16", "bf16")
    float_bits, bits_float, permute_bytes = _bit_intrinsics(types, intrinsic)
    multiply_add = _multiply_add(types, intrinsic)
    multiply = _assembly(types, intrinsic, "mul.rn.f32 $0, $1, $2;", "float32", 2)
    exp2 = _assembly(types, intrinsic, "ex2.approx.ftz.f32 $0, $1;", "float32", 1)
    hidden = _assembly(types, intrinsic, "mov.b32 $0, $1;", "int32", 1)
    mma_half, mma_bfloat16 = (_mma_intrinsic(types, intrinsic, operand) for operand in ("f16", "bf16"))
    load_matrices, load_matrices_transposed = (_matrix_intrinsic(types, intrinsic, how) for how in ("", ".trans"))


@pure_function
def load_floats(array: Any, offset: Any) -> Any:
    a, b, c, d = load16(array, offset)
    return bits_float(a), bits_float(b), bits_float(c), bits_float(d)


@pure_function
def store_floats(array: Any, offset: Any, four: Any) -> None:
    a, b, c, d = four
    store16(array, offset, (float_bits(a), float_bits(b), float_bits(c), float_bits(d)))


__all__ = [
    "bits_float",
    "element_at",
    "exp2",
    "float_bits",
    "hidden",
    "load16",
    "load_floats",
    "load_matrices",
    "load_matrices_transposed",
    "mma_bfloat16",
    "mma_half",
    "multiply",
    "multiply_add",
    "pack_bfloat16",
    "pack_half",
    "permute_bytes",
    "store16",
    "store_floats",
    "stream16",
    "unpack_bfloat16",
    "unpack_half",
]
