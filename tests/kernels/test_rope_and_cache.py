"""rope and rope_and_cache, every implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.kernels import (
    PAGE_KINDS,
    STORAGES,
    Implementation,
    assert_same_bits,
    cases,
    compare,
    each_implementation,
    normal,
    store,
)

Array = Any


class Shape(NamedTuple):
    """A call: T tokens, NH and KVH heads of size D of which R are rotated, blocks of B tokens."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    block_size: int
    kind: str = "float32"


class Result(NamedTuple):
    """Everything that a call may change, on the host; pages in the plain layout [nb, KVH, B, D], as stored."""

    qkv: Array
    keys: Array
    values: Array


POSITIONS = 5000


def inputs(shape: Shape) -> tuple[Array, Array, Array, Array, Array]:
    """qkv [T, NH + 2 KVH, D], cos and sin [P, R/2], positions and slots [T]; the slots are scattered."""
    qkv = normal(1, shape.tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    frequencies = 10000.0 ** (-np.arange(shape.rotary // 2) / (shape.rotary // 2))
    angles = np.outer(np.arange(POSITIONS), frequencies)
    rng = np.random.default_rng(2)
    positions = rng.integers(0, POSITIONS, shape.tokens).astype(np.int32)
    slots = rng.permutation(num_blocks(shape) * shape.block_size)[: shape.tokens].astype(np.int64)
    return qkv, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), positions, slots


def num_blocks(shape: Shape) -> int:
    """Blocks of the pool: more than the tokens fill."""
    return shape.tokens // shape.block_size + 3


def call(impl: Implementation, shape: Shape, arrays: tuple[Array, ...]) -> Result:
    """Run the op on views of one buffer, and pages full of ones."""
    qkv, cos, sin, positions, slots = map(impl.array, arrays)
    plain = np.ones((num_blocks(shape), shape.kv_heads, shape.block_size, shape.head_dim), np.float32)
    keys, values = impl.key_pages(plain, shape.kind), impl.value_pages(plain, shape.kind)
    k, v = shape.heads, shape.heads + shape.kv_heads
    impl.run("rope_and_cache", qkv[:, :k], qkv[:, k:v], qkv[:, v:], cos, sin, positions, keys, values, slots)
    return Result(impl.host(qkv), impl.plain_keys(keys), impl.plain_values(values))


def formula(shape: Shape, arrays: tuple[Array, ...]) -> Array:
    """qkv with q and k rotated, pair by pair, as complex numbers in float64."""
    qkv, cos, sin, positions, _ = arrays
    result, half = qkv.astype(np.float64), shape.rotary // 2
    for t, position in enumerate(positions):
        for head in range(shape.heads + shape.kv_heads):
            pairs = result[t, head, :half] + 1j * result[t, head, half : 2 * half]
            pairs *= cos[position].astype(np.float64) + 1j * sin[position]
            result[t, head, :half], result[t, head, half : 2 * half] = pairs.real, pairs.imag
    return result


SHAPES = [
    Shape(1, 4, 2, 8, 8, 4),
    Shape(5, 3, 1, 33, 32, 1),
    Shape(2, 65, 5, 128, 128, 16),
    Shape(33, 9, 3, 64, 64, 16),
    Shape(7, 1, 1, 256, 64, 32),
    Shape(3, 2, 2, 20, 10, 4),
]
SMALL_SHAPES = [SHAPES[0], SHAPES[1], SHAPES[5], Shape(2, 2, 1, 24, 16, 4)]


@cases(SHAPES, SMALL_SHAPES)
def test_rotation(impl: Implementation, case: Shape) -> None:
    """The first R dims of q and k turn by the angles of the position, in pairs (i, i + R/2); the rest and v stay."""
    arrays = inputs(case)
    compare(impl, lambda i: call(i, case, arrays).qkv, lambda: formula(case, arrays), 1e-6)
    result = call(impl, case, arrays).qkv
    assert_same_bits(result[:, :, case.rotary :], arrays[0][:, :, case.rotary :])
    assert_same_bits(result[:, case.heads + case.kv_heads :], arrays[0][:, case.heads + case.kv_heads :])


@cases(
    [shape._replace(kind=kind) for shape in SHAPES for kind in PAGE_KINDS],
    [shape._replace(kind=kind) for shape in (SMALL_SHAPES[1], SMALL_SHAPES[3]) for kind in PAGE_KINDS],
)
def test_pages(impl: Implementation, case: Shape) -> None:
    """Each token's rotated k and its v lie in its slot, rounded to nearest, with their scales; no other slot has changed."""
    arrays = inputs(case)
    result = call(impl, case, arrays)
    slots = arrays[-1]
    places = slots // case.block_size, slice(None), slots % case.block_size
    k, v = case.heads, case.heads + case.kv_heads
    keys, values = np.ones((2, num_blocks(case), case.kv_heads, case.block_size, case.head_dim), np.float32)
    keys[places], values[places] = result.qkv[:, k:v], result.qkv[:, v:]
    assert_same_bits(result.keys, impl.plain_keys(impl.key_pages(keys, case.kind)))
    assert_same_bits(result.values, impl.plain_values(impl.value_pages(values, case.kind)))


@each_implementation
@pytest.mark.parametrize("kind", STORAGES)
def test_rounding_of_special_numbers(impl: Implementation, kind: str) -> None:
    """Ties go to even, what is too large becomes infinite, denormals are kept, and NaN stays NaN."""
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519, 65520, 1e6, -1e39, 3e-8, 1e-40, -0.0, np.inf]
    numbers += [-65504, -65520, 2**-24, 2**-25, np.nan]  # 16 in all, so that they may be written at once
    with np.errstate(over="ignore"):
        v = np.array(numbers, np.float64).astype(np.float32).reshape(1, 1, -1)
    shape = Shape(1, 1, 1, v.shape[-1], 8, 4, kind)
    qkv, *rest = inputs(shape)
    qkv[:, 2] = v[0]
    stored = call(impl, shape, (qkv, *rest)).values
    block, offset = divmod(int(rest[-1][0]), 4)
    found, expected = stored[block, 0, offset], store(v[0, 0], kind)
    assert_same_bits(found[:-1], expected[:-1])
    nan = {"float32": np.isnan, "float16": np.isnan, "bfloat16": lambda bits: (bits & 0x7FFF) > 0x7F80}[kind]
    assert nan(found[-1])


INT8_HEADS: list[tuple[list[float], float, list[int]]] = [  #: numbers, their scale, and codes where they are told
    ([127, -127, 0.5, 1.5, -0.5, -2.5], 1, [127, -127, 0, 2, 0, -2]),
    ([1e30, 1e28, -1e30, 0, 3e-40, -0.0], 1e30 / 127, [127, 1, -127, 0, 0, 0]),
    ([3e38, -3e38, 2e38, 0, 0, 0], 3e38 / 127, [127, -127, 85, 0, 0, 0]),
    ([2e-30, -2e-30, 1e-30, 0, 0, 0], 2e-30 / 127, [127, -127, 64, 0, 0, 0]),
    ([1e-31, -1e-31, 1e-40, 0, 0, 0], 0, [0] * 6),
    ([0, 0, 0, 0, 0, -0.0], 0, [0] * 6),
    ([1, 2, np.nan, 3, 4, 5], np.nan, []),
    ([1, np.inf, 2, 3, 4, 5], np.nan, []),
    ([-np.inf, 1, 2, 3, 4, np.inf], np.nan, []),
]


@cases(INT8_HEADS, [])
def test_int8_of_special_numbers(impl: Implementation, case: tuple[list[float], float, list[int]]) -> None:
    """Ties go to even, the largest number is 127, what is next to nothing is 0, and what is not finite has a scale of NaN."""
    numbers, scale, codes = case
    shape = Shape(1, 1, 2, 6, 0, 2, "int8")
    qkv, cos, sin, positions, _ = inputs(shape)
    qkv[:, [2, 4]] = np.array(numbers, np.float32)  # k and v of head 1
    result = call(impl, shape, (qkv, cos, sin, positions, np.array([3])))
    key, value = result.keys[1, 1], result.values[1, 1, 1]
    stored = np.ascontiguousarray(key.T)  # [D + 4, B]: codes, and then the scales of both tokens
    for found, its_codes in ((stored[6:].reshape(-1)[4:], stored[:6, 1]), (value[6:], value[:6])):
        np.testing.assert_allclose(found.copy().view(np.float32), [scale], rtol=1e-7)
        assert not codes or its_codes.tolist() == codes


@each_implementation
def test_negative_slots_are_padding(impl: Implementation) -> None:
    """A token with a negative slot is not written anywhere."""
    shape = Shape(4, 2, 1, 8, 8, 4)
    *rest, slots = inputs(shape)
    padded = slots.copy()
    padded[1], padded[3] = -1, -5
    result, without = call(impl, shape, (*rest, padded)), call(impl, shape, (*rest, slots))
    for pages, all_pages in ((result.keys, without.keys), (result.values, without.values)):
        expected = all_pages.copy()
        for slot in slots[[1, 3]]:
            expected[slot // 4, :, slot % 4] = 1
        assert_same_bits(pages, expected)


@each_implementation
def test_a_token_does_not_depend_on_the_batch(impl: Implementation) -> None:
    """Alone and in a batch that is shared among threads, a token gives the same bits."""
    shape = Shape(3, 2, 1, 8, 8, 4) if impl.simulated else Shape(60, 9, 3, 64, 64, 16)
    qkv, cos, sin, positions, slots = inputs(shape)
    together = call(impl, shape, (qkv, cos, sin, positions, slots)).qkv
    for t in range(0, shape.tokens, 5):
        one = slice(t, t + 1)
        alone = call(impl, shape, (qkv[one], cos, sin, positions[one], slots[one])).qkv
        assert_same_bits(alone, together[one])


def rope(impl: Implementation, shape: Shape, arrays: tuple[Array, ...], last: int, in_place: bool) -> Array:
    """The queries of a buffer rotated by the op ``rope``, on the host."""
    qkv, cos, sin, positions = map(impl.array, arrays[:4])
    q = qkv[:, : shape.heads]
    out = q if in_place else impl.array(np.full((shape.tokens, shape.heads + 1, shape.head_dim), np.nan, np.float32))
    impl.run("rope", out[:, : shape.heads], q, cos, sin, positions, last)
    if not in_place:
        assert_same_bits(impl.host(q), arrays[0][:, : shape.heads])
        assert np.isnan(impl.host(out)[:, shape.heads :]).all()
    return impl.host(out)[:, : shape.heads]


@cases(SHAPES, SMALL_SHAPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_is_the_rotation_to_a_position_that_ends(impl: Implementation, case: Shape, in_place: bool) -> None:
    """``rope`` gives the bits of rope_and_cache at the position min(p, last), to a buffer of its own or in place."""
    qkv, cos, sin, positions, slots = inputs(case)
    for last in (0, 1000, POSITIONS):
        expected = call(impl, case, (qkv, cos, sin, np.minimum(positions, last), slots)).qkv
        result = rope(impl, case, (qkv, cos, sin, positions), last, in_place)
        assert_same_bits(result, expected[:, : case.heads])
