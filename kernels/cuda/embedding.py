"""The embedding: a thread reads eight inputs of a row, 16 bytes of a float16 one, and writes them as float32."""

from __future__ import annotations

from typing import Any

from numpy import float32

from ..ops import PackedWeight
from .intrinsics import load16, load_floats, unpack_bfloat16, unpack_half
from .linear_operands import BIAS, EIGHT, SYMMETRIC_BIAS, eight_bytes, eight_nibbles
from .rows import choose, for_each_access
from .target import THREADS, blocks_for, cuda, kernel, launch, pure_function
from .weights import TILE, arrays_of

Array = Any

NOTHING = float32(-0.0)  #: to add it changes no number, -0 among them


@pure_function
def float32_values(codes: Array, scales: Array, minima: Array, row: Any, eight: Any) -> Any:
    """The eight weights from input 8 * ``eight`` on of a row, as they are; so the functions below, for the other kinds."""
    place = row * codes.shape[1] + eight * EIGHT
    return load_floats(codes, place), load_floats(codes, place + 4)


@pure_function
def float16_values(codes: Array, scales: Array, minima: Array, row: Any, eight: Any) -> Any:
    a, b, c, d = load16(codes, row * codes.shape[1] + eight * EIGHT)
    return (*unpack_half(a), *unpack_half(b)), (*unpack_half(c), *unpack_half(d))


@pure_function
def bfloat16_values(codes: Array, scales: Array, minima: Array, row: Any, eight: Any) -> Any:
    a, b, c, d = load16(codes, row * codes.shape[1] + eight * EIGHT)
    return (*unpack_bfloat16(a), *unpack_bfloat16(b)), (*unpack_bfloat16(c), *unpack_bfloat16(d))


@pure_function
def int8_values(codes: Array, scales: Array, minima: Array, row: Any, eight: Any) -> Any:
    tile, g, h = row // TILE, row % 8, row % TILE // 8
    place = eight // 4 * 128 + g * 16 + eight % 4 * 4 + h * 2
    a, b, c, d = eight_bytes(codes[tile, place], codes[tile, place + 1])
    scale = unpack_half(scales[tile, eight // 4 * 8 + g])[h]
    return scaled(a, b, scale, NOTHING, NOTHING), scaled(c, d, scale, NOTHING, NOTHING)


@pure_function
def int4_values(codes: Array, scales: Array, minima: Array, row: Any, eight: Any) -> Any:
    tile, g, h = row // TILE, row % 8, row % TILE // 8
    a, b, c, d = int4_codes(codes, tile, g, h, eight)
    place = eight // 4 * 8 + g
    scale, minimum = unpack_half(scales[tile, place])[h], unpack_half(minima[tile, place])[h]
    return scaled(a, b, scale, BIAS, minimum), scaled(c, d, scale, BIAS, minimum)


@pure_function
def int4_symmetric_values(codes: Array, scales: Array, minima: Array, row: Any, eight: Any) -> Any:
    tile, g, h = row // TILE, row % 8, row % TILE // 8
    a, b, c, d = int4_codes(codes, tile, g, h, eight)
    scale = unpack_half(scales[tile, eight // 4 * 8 + g])[h]
    return scaled(a, b, scale, SYMMETRIC_BIAS, NOTHING), scaled(c, d, scale, SYMMETRIC_BIAS, NOTHING)


@pure_function
def int4_codes(codes: Array, tile: Any, g: Any, h: Any, eight: Any) -> Any:
    return eight_nibbles(codes[tile, eight // 8 * 128 + g * 16 + eight % 4 * 4 + h * 2 + eight // 4 % 2])


@pure_function
def scaled(first: Any, second: Any, scale: Any, bias: Any, minimum: Any) -> Any:
    """Two words of codes in bfloat16 as four weights; the products are exact."""
    a, b = unpack_bfloat16(first)
    c, d = unpack_bfloat16(second)
    return (
        (a + bias) * scale + minimum,
        (b + bias) * scale + minimum,
        (c + bias) * scale + minimum,
        (d + bias) * scale + minimum,
    )


VALUES = {
    "float32": float32_values,
    "float16": float16_values,
    "bfloat16": bfloat16_values,
    "int8": int8_values,
    "int4": int4_values,
    "int4_symmetric": int4_symmetric_values,
}


def _embed_kernels(values: Any) -> Any:
    def make(load: Any, store: Any) -> Any:
        @kernel
        def embed_kernel(out: Array, codes: Array, scales: Array, minima: Array, token_ids: Array) -> None:
            token, eight = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
            i = eight * EIGHT
            if i < out.shape[1]:
                first, second = values(codes, scales, minima, token_ids[token], eight)
                store(out, token, i, first)
                if i + 4 < out.shape[1]:
                    store(out, token, i + 4, second)

        return embed_kernel

    return for_each_access(make)


#: By kind of the weight, by access to ``out``.
embed_kernels = {kind: _embed_kernels(values) for kind, values in VALUES.items()}


def embed(out: Array, weight: PackedWeight, token_ids: Array) -> None:
    """See :meth:`kernels.ops.Ops.embed`."""
    grid = out.shape[0], blocks_for(out.shape[1], EIGHT * THREADS)
    launch(choose(embed_kernels[weight.kind], out), grid, THREADS, out, *arrays_of(weight), token_ids)
