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
    """No weight is off by more than half a step of its group, however small, large or far from zero the weights are."""
    rows = ((rows + np.float32(offset)) * np.float32(2.0**exponent)).astype(np.float32)
    found = back(rows, kind)
    # A weight on the short side of a symmetric grid is at most one step beyond its end.
    steps = 1 if kind == "int4_symmetric" else 0.5
    assert np.all(np.abs(found - rows) <= largest_step(rows, kind)[:, None] * (steps + 1e-5) + 1e-6 * np.abs(rows))


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
