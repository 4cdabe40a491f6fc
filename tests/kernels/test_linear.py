"""Packed weights, linear and embed, every implementation."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from helpers.kernels import (
    CPU,
    REFERENCE,
    STORAGES,
    Implementation,
    any_groups,
    assert_close,
    assert_same_bits,
    cases,
    compare,
    each_implementation,
    normal,
    rounded,
    seen_inputs,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.kernels.ops import WEIGHT_KINDS, Groups
from minipage.kernels.quantization import GROUP_KINDS, dequantize, ungroup

Array = Any

#: Tokens, outputs, inputs: around the sizes of panels (16), groups (32) and register tiles (1, 3, 6).
SHAPES = [(1, 1, 1), (1, 16, 32), (2, 17, 33), (5, 50, 31), (6, 48, 64), (7, 15, 100), (33, 200, 97), (3, 1000, 576)]
SMALL_SHAPES = [(1, 1, 1), (2, 17, 33), (5, 50, 40)]


@cases(
    [(kind, *shape) for kind in WEIGHT_KINDS for shape in SHAPES],
    [(kind, *shape) for kind in WEIGHT_KINDS for shape in SMALL_SHAPES],
)
def test_linear(impl: Implementation, case: tuple[str, int, int, int]) -> None:
    """x @ weight.T + bias, with the weights that ``unpack_rows`` gives, with and without bias."""
    kind, tokens, outputs, inputs = case
    x, rows, bias = normal(1, tokens, inputs), normal(2, outputs, inputs), normal(3, outputs)
    seen = seen_inputs(impl, x, kind)
    for b in (None, bias):

        def formula(b: Array | None = b) -> Array:
            weight = REFERENCE.device.ops.unpack_rows(REFERENCE.weight(rows, kind), 0, outputs)
            return seen.astype(np.float64) @ weight.T + (0 if b is None else b)

        def compute(i: Implementation, b: Array | None = b) -> Array:
            inputs = x if i is impl else seen
            return i.result("linear", (tokens, outputs), inputs, i.weight(rows, kind), b)

        compare(impl, compute, formula, 1e-5)


@pytest.mark.parametrize(("kind", "steps"), [("int8", 32767), ("int4", 127), ("int4_symmetric", 127)])
def test_inputs_are_rounded_to_nearest(kind: str, steps: int) -> None:
    """The CPU quantises inputs to within half a step of their group; small and zero groups do no harm."""
    x = normal(1, 5, 96) * 10.0 ** np.arange(-2, 3, dtype=np.float32)[:, None]
    x[0, :32], x[1, 32:64], x[2, 0] = 0, 1e-38, 1e4
    identity = CPU.weight(np.eye(96, dtype=np.float32) * (127 if kind == "int8" else 1), kind)
    scale = CPU.device.ops.unpack_rows(identity, 0, 96).max()
    seen = CPU.result("linear", (5, 96), x, identity, None) / scale
    limit = np.repeat(np.abs(x).reshape(5, 3, 32).max(axis=-1), 32, axis=-1) / steps / 2
    assert np.all(np.abs(seen - x) <= limit * 1.001 + 1e-30)


@cases(
    list(itertools.product(WEIGHT_KINDS, [(61, 33), (100, 64), (3, 7)])), [(kind, (37, 33)) for kind in WEIGHT_KINDS]
)
def test_rows_come_back(impl: Implementation, case: tuple[str, tuple[int, int]]) -> None:
    """Packed in pieces of any size and unpacked in others, rows are what the reference makes of them, bit for bit."""
    kind, (outputs, inputs) = case
    rows = normal(1, outputs, inputs)
    weight = impl.device.ops.empty_weight(rows.shape, kind, impl.device.xp)
    pieces = [0, 1, outputs // 4, outputs // 2 + 1, outputs]
    for start, stop in itertools.pairwise(pieces):
        impl.device.ops.pack_rows(weight, start, rows[start:stop])
    expected = REFERENCE.device.ops.unpack_rows(REFERENCE.weight(rows, kind), 0, outputs)
    for start, stop in ((0, outputs), (1, outputs // 3 + 1), (outputs - 1, outputs), (2, 2)):
        assert_same_bits(impl.device.ops.unpack_rows(weight, start, stop), expected[start:stop])


@each_implementation
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("source", STORAGES)
def test_float_rows_are_rounded_to_nearest(impl: Implementation, kind: str, source: str) -> None:
    """From any storage to any other: exact where it can be, else to nearest."""
    rows = store(normal(1, 21, 10), source)
    weight = impl.weight(rows, kind)
    expected = rounded(rounded(normal(1, 21, 10), source), kind)
    assert_same_bits(impl.device.ops.unpack_rows(weight, 0, 21), expected)


@cases(list(itertools.product(GROUP_KINDS, [(61, 33), (100, 64), (3, 7)])), [(kind, (37, 33)) for kind in GROUP_KINDS])
def test_groups_come_back(impl: Implementation, case: tuple[str, tuple[int, int]]) -> None:
    """Any codes and scales, packed in pieces of any size, are kept bit for bit, negative and subnormal scales too."""
    kind, (outputs, inputs) = case
    groups = any_groups(1, outputs, inputs, kind)
    weight = impl.device.ops.empty_weight((outputs, inputs), kind, impl.device.xp)
    for start, stop in itertools.pairwise([0, 1, outputs // 4, outputs // 2 + 1, outputs]):
        piece = Groups(*(part if part is None else part[start:stop] for part in groups))
        impl.device.ops.pack_groups(weight, start, piece)
    expected = ungroup(dequantize(groups, kind), inputs)
    for start, stop in ((0, outputs), (1, outputs // 3 + 1), (outputs - 1, outputs), (2, 2)):
        assert_same_bits(impl.device.ops.unpack_rows(weight, start, stop), expected[start:stop])
    if inputs % 32 == 0:  # and a layer reads them as they are
        x = normal(2, 3, inputs)
        product = seen_inputs(impl, x, kind).astype(np.float64) @ expected.T
        assert_close(impl.result("linear", (3, outputs), x, weight, None), product, 1e-5)


@each_implementation
@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_groups_may_be_fields_of_blocks(impl: Implementation, kind: str) -> None:
    """Two codes of four bits may share a byte, and all may lie block by block as in a file: the weight is the same."""
    outputs, inputs = 37, 70
    groups = any_groups(2, outputs, inputs, kind)
    codes = groups.codes
    if kind != "int8":
        codes = codes[..., :16] + 16 * codes[..., 16:]
    parts = [("minima", "<f2"), ("scales", "<f2"), ("codes", codes.dtype, codes.shape[-1])]
    blocks = np.zeros(groups.scales.shape, np.dtype(parts))
    blocks["codes"], blocks["scales"] = codes, groups.scales
    minima = None
    if groups.minima is not None:
        blocks["minima"] = groups.minima
        minima = blocks["minima"]
    weight = impl.device.ops.empty_weight((outputs, inputs), kind, impl.device.xp)
    for start, stop in itertools.pairwise([0, 16, 32, 33, outputs]):
        piece = Groups(blocks["codes"], blocks["scales"], minima)
        piece = Groups(*(part if part is None else part[start:stop] for part in piece))
        impl.device.ops.pack_groups(weight, start, piece)
    expected = ungroup(dequantize(groups, kind), inputs)
    assert_same_bits(impl.device.ops.unpack_rows(weight, 0, outputs), expected)


@each_implementation
def test_bad_groups_are_refused(impl: Implementation) -> None:
    """Of another kind, shape or dtype than the weight, or at the wrong place."""
    weight = impl.device.ops.empty_weight((4, 40), "int4", impl.device.xp)
    good = any_groups(1, 2, 40, "int4")
    bad = [
        (0, any_groups(1, 2, 40, "int4_symmetric")),
        (0, any_groups(1, 2, 40, "int8")),
        (0, any_groups(1, 2, 70, "int4")),
        (0, good._replace(scales=good.scales.astype(np.float32))),
        (3, good),
        (-1, good),
    ]
    for start, groups in bad:
        with pytest.raises(ValueError, match=r"do not fit a weight of kind int4 and shape \(4, 40\)"):
            impl.device.ops.pack_groups(weight, start, groups)
    with pytest.raises(ValueError, match=r"float16; allowed: int8, int4, int4_symmetric"):
        impl.device.ops.pack_groups(impl.device.ops.empty_weight((4, 40), "float16", impl.device.xp), 0, good)


@each_implementation
def test_bad_rows_are_refused(impl: Implementation) -> None:
    """Too large for float16, not finite where it is quantised, of the wrong shape or at the wrong place, unknown kind."""
    large, broken = np.full((2, 4), 1e6, np.float32), np.array([[1, np.nan, 2, np.inf]], np.float32)
    with pytest.raises(ValueError, match=r"1e\+06.*float16"):
        impl.weight(large, "float16")
    for kind in GROUP_KINDS:
        with pytest.raises(ValueError, match="NaN or infinite"):
            impl.weight(broken, kind)
    weight = impl.device.ops.empty_weight((4, 4), "float32", impl.device.xp)
    for start, rows in ((3, large), (-1, large), (0, large[:, :3]), (0, large[0])):
        with pytest.raises(ValueError, match=r"do not fit a weight of shape \(4, 4\)"):
            impl.device.ops.pack_rows(weight, start, rows)
    with pytest.raises(ValueError, match=r"int3.*int8"):
        impl.device.ops.empty_weight((4, 4), "int3", impl.device.xp)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_packing_needs_little_room(kind: str) -> None:
    """Rows are converted a few at a time, not as a second copy of all of them."""
    rows = normal(1, 2048, 512)
    weight = CPU.device.ops.empty_weight(rows.shape, kind, np)
    tracemalloc.start()
    CPU.device.ops.pack_rows(weight, 0, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows.nbytes


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("float32", 32), ("bfloat16", 16), ("float16", 16), ("int8", 8.5), ("int4", 5), ("int4_symmetric", 4.5)],
)
@each_implementation
def test_bytes_of_a_weight(impl: Implementation, kind: str, bits: float) -> None:
    """A weight takes the bits of its kind, the scales of the groups among them; the reference has a byte for each code."""
    if impl is REFERENCE and kind in ("int4", "int4_symmetric"):
        bits += 4
    weight = impl.device.ops.empty_weight((64, 128), kind, impl.device.xp)
    assert weight.nbytes == 64 * 128 * bits // 8


@cases(WEIGHT_KINDS, WEIGHT_KINDS)
def test_embed(impl: Implementation, case: str) -> None:
    """The rows of the token ids, in any order and repeated, bit for bit."""
    rows, ids = normal(1, 40, 33), np.array([39, 0, 17, 17], np.int32)
    weight = impl.weight(rows, case)
    expected = impl.device.ops.unpack_rows(weight, 0, 40)[ids]
    assert_same_bits(impl.result("embed", (4, 33), weight, ids), expected)


@cases(
    list(itertools.product(WEIGHT_KINDS, [(13, 576, 100), (20, 33, 50)])),
    [("float32", (7, 40, 33)), ("int4", (7, 40, 33))],
)
def test_a_token_does_not_depend_on_the_batch(impl: Implementation, case: tuple[str, tuple[int, int, int]]) -> None:
    """A token's outputs have the same bits alone and in any batch, shared among threads or not."""
    kind, (tokens, outputs, inputs) = case
    x, bias = normal(1, tokens, inputs), normal(2, outputs)
    weight = impl.weight(normal(3, outputs, inputs), kind)
    together = impl.result("linear", (tokens, outputs), x, weight, bias)
    for count in (1, 2, 5):
        for t in range(0, tokens - count, count):
            alone = impl.result("linear", (count, outputs), x[t : t + count], weight, bias)
            assert_same_bits(alone, together[t : t + count])


@pytest.mark.parametrize("impl", [REFERENCE, CPU], ids=repr)
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(WEIGHT_KINDS),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 150),
    splits=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_batches_are_any_split_of_the_tokens(
    impl: Implementation, kind: str, outputs: int, inputs: int, splits: list[int], seed: int
) -> None:
    """However tokens are split into batches, their outputs have the same bits."""
    x = normal(seed, sum(splits), inputs)
    weight = impl.weight(normal(seed + 1, outputs, inputs), kind)
    together = impl.result("linear", (len(x), outputs), x, weight, None)
    ends = np.cumsum(splits)
    parts = [
        impl.result("linear", (count, outputs), x[end - count : end], weight, None)
        for count, end in zip(splits, ends, strict=True)
    ]
    assert_same_bits(np.concatenate(parts), together)


@cases(WEIGHT_KINDS, WEIGHT_KINDS)
def test_nan_and_infinity_pass_through(impl: Implementation, case: str) -> None:
    """A NaN or an infinity of one token comes out of that token, and of no other."""
    x = normal(1, 8, 40)
    x[2, 39], x[5, 0] = np.nan, np.inf
    result = impl.result("linear", (8, 20), x, impl.weight(np.ones((20, 40), np.float32), case), None)
    assert np.isnan(result[2]).all()
    # Quantised inputs have no infinity: the CPU makes a NaN of it. So does CUDA for 4 bits: it adds codes of one sign and takes
    # off what they are too much, infinity from infinity.
    is_lost = case in GROUP_KINDS if impl is CPU else impl.name.startswith("cuda") and case.startswith("int4")
    assert (np.isnan if is_lost else np.isposinf)(result[5]).all()
    assert np.isfinite(np.delete(result, [2, 5], axis=0)).all()


@each_implementation
def test_long_sums_stay_accurate(impl: Implementation) -> None:
    """Sums over many inputs are as good as float32 allows."""
    inputs = 512 if impl.simulated else 11008
    x, rows = normal(1, 2, inputs) * 300, normal(2, 4, inputs)
    result = impl.result("linear", (2, 4), x, impl.weight(rows, "float32"), None)
    assert_close(result, x.astype(np.float64) @ rows.T, 1e-5)
