"""What quantising does to weights, whatever layout keeps them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.kernels import any_groups, assert_same_bits, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minipage.kernels.ops import Groups
from minipage.kernels.quantization import GROUP_KINDS, dequantize, quantize, ungroup

Array = Any

EPSILON = 2.0**-11  #: relative error of a float16
SMALLEST = 2.0**-24  #: the smallest float16


def largest_step(part: Array, kind: str) -> Array:
    """The most that a step of a group [..., 32] may be: its range over the number of steps, plus the rounding of float16."""
    if kind == "int8":
        step = np.abs(part).max(-1) / 127
    elif kind == "int4_symmetric":
        step = np.abs(part).max(-1) / 8
    else:
        low = part.min(-1)
        step = (part.max(-1) - low + np.abs(low) * 2 * EPSILON + SMALLEST) / 15
    return step * (1 + 2 * EPSILON) + SMALLEST


def back(rows: Array, kind: str) -> Array:
    """Rows as they come out of their quantised form."""
    return ungroup(dequantize(quantize(rows, kind), kind), rows.shape[1])


@pytest.mark.parametrize("kind", GROUP_KINDS)
@settings(max_examples=200, deadline=None)
@given(
    rows=arrays(np.float32, (2, 32), elements=st.floats(-1, 1, width=32)),
    exponent=st.integers(-30, 9),
    offset=st.sampled_from([0.0, 0.0, 1.0, -3.0, 100.0]),
)
def test_error_is_half_a_step(kind: str, rows: Array, exponent: int, offset: float) -> None:
    """The root mean square of the errors of a group is at most half a step of a grid over its whole range, however small, large
    or far from zero the weights are; in int8 that is so for every single error."""
    rows = ((rows + np.float32(offset)) * np.float32(2.0**exponent)).astype(np.float32)
    errors = np.abs(back(rows, kind) - rows)
    if kind != "int8":
        errors = np.sqrt(np.mean(errors**2, axis=-1, keepdims=True))
    # The weight that is farthest out on the short side of a symmetric grid may be a whole step beyond its end.
    steps = 1 if kind == "int4_symmetric" else 0.5
    largest = np.abs(rows).max(-1, keepdims=True)
    assert np.all(errors <= largest_step(rows, kind)[:, None] * (steps + 1e-5) + 1e-6 * largest)


@pytest.mark.parametrize("kind", GROUP_KINDS)
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 6), inputs=st.integers(20, 200), seed=st.integers(0, 2**32), exponent=st.integers(-12, 4))
def test_weights_on_a_grid_stay_on_it(kind: str, rows: int, inputs: int, seed: int, exponent: int) -> None:
    """Weights that are code * scale + minimum already, with float16 scales and minima, come back: exactly where the grid's ends
    are taken, else to the rounding of a minimum to float16."""
    rng = np.random.default_rng(seed)
    shape = rows, -(-inputs // 32)
    low, high = (-127, 127) if kind == "int8" else (0, 15)
    codes = rng.integers(low, high + 1, (*shape, 32)).astype(np.int8 if kind == "int8" else np.uint8)
    scales = (rng.uniform(0.5, 1, shape) * 2.0**exponent).astype(np.float16)
    minima = (rng.normal(size=shape) * 8 * 2.0**exponent).astype(np.float16) if kind == "int4" else None
    if kind == "int4_symmetric":
        scales *= rng.choice([-1, 1], shape).astype(np.float16)
    codes[..., 0], codes[..., 1] = low, high
    weights = ungroup(dequantize(Groups(codes, scales, minima), kind), inputs)
    assert_same_bits(back(weights, kind) + np.float32(0), weights + np.float32(0))
    if kind != "int8":  # now a grid of which one end at least is not taken
        codes = rng.integers(1, 15, codes.shape).astype(np.uint8)
        codes[..., 0], codes[..., 1] = 1, 14
        weights = ungroup(dequantize(Groups(codes, scales, minima), kind), inputs)
        assert np.all(np.abs(back(weights, kind) - weights) <= 16 * 2.0**exponent * EPSILON * 2)


def test_the_search_pays() -> None:
    """On normally distributed weights the squared error is at least a tenth less than on grids over the whole range; a search
    never makes it larger."""
    rows = normal(1, 200, 64)
    low = rows.reshape(200, 2, 32).min(-1, keepdims=True)
    step = np.ptp(rows.reshape(200, 2, 32), axis=-1, keepdims=True) / 15
    spread = np.rint((rows.reshape(200, 2, 32) - low) / step) * step + low
    nearest = np.mean((spread.reshape(rows.shape) - rows) ** 2)
    assert np.mean((back(rows, "int4") - rows) ** 2) < 0.85 * nearest


@pytest.mark.parametrize(("kind", "share"), [("int4", 0.2), ("int4_symmetric", 0.4)])
def test_important_inputs_are_more_exact(kind: str, share: float) -> None:
    """An input that weighs a thousand times more than its group is a fraction as wrong as without; and all weighing alike is
    as if nothing was said."""
    rows = normal(1, 300, 40)
    importance = np.ones(40, np.float32)
    assert_same_bits(ungroup(dequantize(quantize(rows, kind, importance), kind), 40), back(rows, kind))
    importance[[7, 35]] = 1000
    found = ungroup(dequantize(quantize(rows, kind, importance), kind), 40)
    for column in (7, 35):
        weighed, plain = (np.std(values[:, column] - rows[:, column]) for values in (found, back(rows, kind)))
        assert weighed < share * plain


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_groups_keep_out_of_each_other(kind: str) -> None:
    """A group is quantised as it would be alone, and padding changes nothing."""
    rows = normal(1, 5, 77)
    rows[:, 32:] += 100
    together = back(rows, kind)
    for start, stop in itertools.pairwise([0, 32, 64, 77]):
        assert_same_bits(together[:, start:stop], back(rows[:, start:stop], kind))


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_equal_weights(kind: str) -> None:
    """Groups of zeros give zeros; groups of one value give it to the precision of float16."""
    assert np.all(back(np.zeros((1, 40), np.float32), kind) == 0)
    for value in (0.3, -0.3, 1e-6, -70.0):
        found = back(np.full((1, 40), value, np.float32), kind)
        assert np.all(np.abs(found - value) <= abs(value) * EPSILON * 2 + SMALLEST)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_dequantised_as_defined(kind: str) -> None:
    """The formulas of the module, in float32, one group at a time."""
    groups = any_groups(1, 3, 96, kind)
    found = dequantize(groups, kind)
    for n, g in itertools.product(range(3), range(3)):
        scale = np.float32(groups.scales[n, g])
        codes = groups.codes[n, g].astype(np.float32)
        expected = (codes - 8) * scale if kind == "int4_symmetric" else codes * scale
        if kind == "int4":
            expected = expected + np.float32(groups.minima[n, g])
        assert_same_bits(found[n, g], expected)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_codes_are_in_range(kind: str) -> None:
    """Codes and scales have the dtypes and ranges of their kind."""
    groups: Groups = quantize(normal(1, 50, 64) * 3, kind)
    assert groups.codes.shape == (50, 2, 32) and groups.scales.shape == (50, 2)
    assert groups.scales.dtype == np.float16 and (groups.minima is not None) == (kind == "int4")
    low, high, dtype = (-127, 127, np.int8) if kind == "int8" else (0, 15, np.uint8)
    assert groups.codes.dtype == dtype and groups.codes.min() >= low and groups.codes.max() <= high


@pytest.mark.parametrize(("kind", "large"), [("int8", 1e7), ("int4", 1e6), ("int4", -1e5), ("int4_symmetric", 1e6)])
def test_what_float16_cannot_scale_is_refused(kind: str, large: float) -> None:
    """Weights whose scale or minimum would be infinite, and weights that are not finite themselves."""
    rows = normal(1, 2, 40)
    rows[1, 35] = large
    with pytest.raises(ValueError, match=rf"{large:.6g}.* too large for {kind}".replace("+", r"\+").replace("-1", "1")):
        quantize(rows, kind)
    for value in (np.nan, np.inf):
        rows[1, 35] = value
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantize(rows, kind)
