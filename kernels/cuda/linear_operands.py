"""What products on tensor cores are made of: weights of each kind as operand a, tokens as operand b, and their sums.

16 outputs are the rows of a, 8 tokens the columns of b (:mod:`.intrinsics`). A product adds up over 16 inputs, in any order that
a and b share: lane (g, p) takes eight inputs side by side, 8p.. of 32, as its words of two products. So weights come straight
from memory, 16 bytes a lane, and nothing is transposed. STEP inputs are two times 32.

float32 inputs become pairs of 16-bit floats, ``high + low``, each of which is multiplied: x is then exact to 2**-17 of itself.
Sums are float32. The kinds differ in

    bfloat16         weights as they are; high and low bfloat16
    float16          weights as they are; high = x / 16 in float16, low = what that leaves, 2048 times as large, in sums of its
                     own: exact to 2**-23 of x or to 2**-32, for x up to 2**20 in magnitude; beyond that x is infinite
    int8             codes as bfloat16; the sum over a group is multiplied by its scale
    int4 kinds       codes + 128 as bfloat16 (three instructions for two); 128 times the group's sum of x is taken off the sum
                     over the group, which is multiplied by its scale, and the minimum is multiplied by the group's sum of x
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy import float32, int32, uint32

from ..ops import GROUP_SIZE
from ..quantization import INT4_ZERO
from .intrinsics import (
    bits_float,
    float_bits,
    mma_bfloat16,
    mma_half,
    multiply_add,
    pack_bfloat16,
    pack_half,
    permute_bytes,
    stream16,
    unpack_bfloat16,
    unpack_half,
)
from .target import pure_function
from .weights import STEP, TILE

Array = Any

EIGHT = 8  #: inputs of a lane, side by side

ZERO = float32(0)
SIGNS = uint32(0x80808080)
#: Two codes, and what makes them 128 + code in bfloat16.
NIBBLES, BIASED_NIBBLES = uint32(0x000F000F), uint32(0x43004300)
#: What to subtract from a float32 of 2**23 with a byte, 128 more than a code, in its last bits; and the bits of 2**23.
INTEGER, INTEGER_BITS = float32(2**23 + 128), uint32(0x4B000000)
#: Selectors of :func:`.intrinsics.permute_bytes`: that byte of a word in the place of the last one of INTEGER_BITS.
FIRST, SECOND, THIRD, FOURTH = uint32(0x7440), uint32(0x7441), uint32(0x7442), uint32(0x7443)
UPPER_HALVES = uint32(0x7632)  #: of two words
BIAS, SYMMETRIC_BIAS = float32(-128), float32(-128 - INT4_ZERO)
HALF_UNIT, HALF_LOW, HALF_LIMIT = float32(1 / 16), float32(2048), float32(32768)
LARGEST_LOW = float32(2.0**100)  #: more than the low part of any number, and small enough to be multiplied


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pure_function
def split_bfloat16(first: Any, second: Any) -> Any:
    """Two inputs as words of their high and low parts. An infinity is in its high part: inf - inf is NaN, which min drops."""
    high = pack_bfloat16(first, second)
    a, b = unpack_bfloat16(high)
    return high, pack_bfloat16(min(LARGEST_LOW, first - a), min(LARGEST_LOW, second - b))


@pure_function
def split_half(first: Any, second: Any) -> Any:
    """The same in float16."""
    x, y = first * HALF_UNIT, second * HALF_UNIT
    high = pack_half(x, y)
    a, b = unpack_half(high)
    low_x, low_y = min(HALF_LIMIT, (x - a) * HALF_LOW), min(HALF_LIMIT, (y - b) * HALF_LOW)
    return high, pack_half(max(-HALF_LIMIT, low_x), max(-HALF_LIMIT, low_y))


@pure_function
def sum_of_parts(high: Any, low: Any) -> Any:
    """The sum of the two numbers that two words of :func:`split_bfloat16` stand for."""
    a, b = unpack_bfloat16(high)
    c, d = unpack_bfloat16(low)
    return (a + c) + (b + d)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pure_function
def float_places(codes: Array, outputs: int, tile: int, lane: int) -> Any:
    """Where a lane reads row g of a tile, and how far behind it row g + 8 is. Beyond the last row it is read again: those outputs
    are written nowhere."""
    row, size = tile * TILE + (lane >> 2), codes.shape[1]
    top, bottom = int32(min(row, outputs - 1)), int32(min(row + TILE // 2, outputs - 1))
    return top * size + EIGHT * (lane & 3), int32((bottom - top) * size)


@pure_function
def float_words(codes: Array, places: Any, step: int) -> Any:
    """Both rows, of the first 32 inputs of a step and of the next."""
    top, bottom = places[0] + step * STEP, places[0] + int32(places[1] + step * STEP)
    return (
        stream16(codes, top),
        stream16(codes, bottom),
        stream16(codes, top + GROUP_SIZE),
        stream16(codes, bottom + GROUP_SIZE),
    )


@pure_function
def code_places(codes: Array, outputs: int, tile: int, lane: int) -> Any:
    """Where a lane reads codes of a tile, both rows at once. Places of words have 32 bits: they take half the registers, and
    :func:`.weights.empty_weight` allows no more words."""
    return (int32(tile * codes.shape[1] + lane * 4),)


@pure_function
def int8_words(codes: Array, places: Any, step: int) -> Any:
    """A group and the next."""
    place = int32(places[0] + step * 256)
    return stream16(codes, place), stream16(codes, place + 128)


@pure_function
def int4_words(codes: Array, places: Any, step: int) -> Any:
    """Two groups at once."""
    return (stream16(codes, int32(places[0] + step * 128)),)


@pure_function
def float_operands(words: Any, half: int) -> Any:
    """The words of operand a of the two products over 32 inputs, the first or the second of STEP."""
    top, bottom = words[2 * half], words[2 * half + 1]
    return (top[0], bottom[0], top[1], bottom[1]), (top[2], bottom[2], top[3], bottom[3])


@pure_function
def int8_operands(words: Any, half: int) -> Any:
    """The same of codes."""
    group = words[half]
    top, bottom = eight_bytes(group[0], group[1]), eight_bytes(group[2], group[3])
    return (top[0], bottom[0], top[1], bottom[1]), (top[2], bottom[2], top[3], bottom[3])


@pure_function
def int4_operands(words: Any, half: int) -> Any:
    """The same of codes, 128 added to each."""
    top, bottom = eight_nibbles(words[0][half]), eight_nibbles(words[0][2 + half])
    return (top[0], bottom[0], top[1], bottom[1]), (top[2], bottom[2], top[3], bottom[3])


@pure_function
def eight_bytes(first: Any, second: Any) -> Any:
    """Codes of eight bits, as words of two in bfloat16."""
    a, b = first ^ SIGNS, second ^ SIGNS
    return (
        two_bytes(a, FIRST, SECOND),
        two_bytes(a, THIRD, FOURTH),
        two_bytes(b, FIRST, SECOND),
        two_bytes(b, THIRD, FOURTH),
    )


@pure_function
def two_bytes(word: Any, low: Any, high: Any) -> Any:
    """Two bytes, 128 more than a code each, as a word of two codes in bfloat16: a byte in the last bits of 2**23 makes a float32,
    and what that is without 2**23 and 128 has bits in its upper half only, which are a bfloat16."""
    x = bits_float(permute_bytes(uint32(word), INTEGER_BITS, low)) - INTEGER
    y = bits_float(permute_bytes(uint32(word), INTEGER_BITS, high)) - INTEGER
    return permute_bytes(float_bits(x), float_bits(y), UPPER_HALVES)


@pure_function
def eight_nibbles(word: Any) -> Any:
    """Codes of four bits, 128 added to each, as words of two in bfloat16."""
    return (
        uint32((word & NIBBLES) | BIASED_NIBBLES),
        uint32(((word >> uint32(4)) & NIBBLES) | BIASED_NIBBLES),
        uint32(((word >> uint32(8)) & NIBBLES) | BIASED_NIBBLES),
        uint32(((word >> uint32(12)) & NIBBLES) | BIASED_NIBBLES),
    )


# ---- sums ------------------------------------------------------------------------------------------------------------
# ``sums`` are the four floats of operand c of a lane; ``a`` the operands of two products, ``b`` their words high, high, low,
# low; ``factors`` the words of the scales and of the minima of the lane's two rows, as far as the kind has them; ``totals`` the
# sums of x over the group, of the lane's two tokens.


@pure_function
def add_bfloat16(sums: Any, a: Any, b: Any, factors: Any, totals: Any) -> Any:
    sums = mma_bfloat16(sums, a[0], (b[0][0], b[0][1]))
    sums = mma_bfloat16(sums, a[0], (b[0][2], b[0][3]))
    sums = mma_bfloat16(sums, a[1], (b[1][0], b[1][1]))
    return mma_bfloat16(sums, a[1], (b[1][2], b[1][3]))


@pure_function
def add_half(sums: Any, a: Any, b: Any, factors: Any, totals: Any) -> Any:
    low = mma_half((ZERO, ZERO, ZERO, ZERO), a[0], (b[0][2], b[0][3]))
    low = mma_half(low, a[1], (b[1][2], b[1][3]))
    high = mma_half(sums, a[0], (b[0][0], b[0][1]))
    high = mma_half(high, a[1], (b[1][0], b[1][1]))
    part = float32(1) / HALF_LOW
    return (
        multiply_add(low[0], part, high[0]),
        multiply_add(low[1], part, high[1]),
        multiply_add(low[2], part, high[2]),
        multiply_add(low[3], part, high[3]),
    )


@pure_function
def add_int8(sums: Any, a: Any, b: Any, factors: Any, totals: Any) -> Any:
    group = add_bfloat16((ZERO, ZERO, ZERO, ZERO), a, b, factors, totals)
    top, bottom = unpack_half(factors[0])
    return _scaled(sums, group, top, bottom)


@pure_function
def add_int4(sums: Any, a: Any, b: Any, factors: Any, totals: Any) -> Any:
    group = add_bfloat16((ZERO, ZERO, ZERO, ZERO), a, b, factors, totals)
    top, bottom = unpack_half(factors[0])
    sums = _scaled(sums, _unbiased(group, totals, BIAS), top, bottom)
    top, bottom = unpack_half(factors[1])
    return _scaled(sums, (totals[0], totals[1], totals[0], totals[1]), top, bottom)


@pure_function
def add_int4_symmetric(sums: Any, a: Any, b: Any, factors: Any, totals: Any) -> Any:
    group = add_bfloat16((ZERO, ZERO, ZERO, ZERO), a, b, factors, totals)
    top, bottom = unpack_half(factors[0])
    return _scaled(sums, _unbiased(group, totals, SYMMETRIC_BIAS), top, bottom)


@pure_function
def _unbiased(group: Any, totals: Any, bias: Any) -> Any:
    return (
        multiply_add(totals[0], bias, group[0]),
        multiply_add(totals[1], bias, group[1]),
        multiply_add(totals[0], bias, group[2]),
        multiply_add(totals[1], bias, group[3]),
    )


@pure_function
def _scaled(sums: Any, group: Any, top: Any, bottom: Any) -> Any:
    return (
        multiply_add(group[0], top, sums[0]),
        multiply_add(group[1], top, sums[1]),
        multiply_add(group[2], bottom, sums[2]),
        multiply_add(group[3], bottom, sums[3]),
    )


class Kind(NamedTuple):
    """How the kernels read and multiply weights of a kind."""

    split: Callable[..., Any]
    places: Callable[..., Any]
    words: Callable[..., Any]
    operands: Callable[..., Any]
    add: Callable[..., Any]
    depth: int  #: steps whose words are on their way from memory while one is multiplied
    scaled: bool = False  #: has scales
    has_minima: bool = False
    shifted: bool = False  #: wants the sums of x over groups
    unit: float = 1.0  #: of the sums
    most_tokens: int = 32  #: at once, as registers allow


_FOUR_BITS: dict[str, Any] = {"scaled": True, "shifted": True, "most_tokens": 16}
KINDS = {
    "bfloat16": Kind(split_bfloat16, float_places, float_words, float_operands, add_bfloat16, depth=1),
    "float16": Kind(split_half, float_places, float_words, float_operands, add_half, depth=1, unit=16.0),
    "int8": Kind(split_bfloat16, code_places, int8_words, int8_operands, add_int8, depth=2, scaled=True),
    "int4": Kind(
        split_bfloat16, code_places, int4_words, int4_operands, add_int4, depth=2, has_minima=True, **_FOUR_BITS
    ),
    "int4_symmetric": Kind(
        split_bfloat16, code_places, int4_words, int4_operands, add_int4_symmetric, depth=3, **_FOUR_BITS
    ),
}
