"""gated_activation, add and gather_rows, every implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.kernels import Implementation, assert_same_bits, cases, compare, each_implementation, normal

from minipage.kernels.ops import ACTIVATIONS

Array = Any


def _gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _gelu_tanh(x: float) -> float:
    return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {"silu": lambda x: x / (1 + math.exp(-x)), "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def gated_formula(gate_up: Array, activation: str) -> Array:
    """Float64, an element at a time."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return np.vectorize(FORMULAS[activation])(gate) * up


SHAPES = [(a, t, i) for a in ACTIVATIONS for t, i in ((1, 1), (3, 33), (5, 1536))]
SMALL_SHAPES = [(a, 3, 33) for a in ACTIVATIONS]


@cases(SHAPES, SMALL_SHAPES)
def test_gated_activation(impl: Implementation, case: tuple[str, int, int]) -> None:
    """activation(gate) * up is its formula."""
    activation, tokens, size = case
    gate_up = normal(1, tokens, 2 * size) * 4
    compare(
        impl,
        lambda i: i.result("gated_activation", (tokens, size), gate_up, activation),
        lambda: gated_formula(gate_up, activation),
        2e-6,
    )


@cases(ACTIVATIONS, ACTIVATIONS)
@pytest.mark.filterwarnings("error")
def test_activations_of_large_numbers(impl: Implementation, case: str) -> None:
    """Far from 0 they are the identity and 0, without overflow."""
    gate = np.array([[1e4, -1e4, 88.8, -88.8, 104.0, -104.0, 7600.0, -7600.0, 0.0, -0.0]], np.float32)
    result = impl.result("gated_activation", gate.shape, np.concatenate([gate, np.ones_like(gate)], axis=1), case)
    np.testing.assert_allclose(result, np.maximum(gate, 0), atol=1e-30)


@each_implementation
def test_activation_of_nan_is_nan(impl: Implementation) -> None:
    """NaN is not hidden, from either half."""
    gate_up = np.ones((1, 6), np.float32)
    gate_up[0, 0] = gate_up[0, 4] = np.nan
    for activation in ACTIVATIONS:
        result = impl.result("gated_activation", (1, 3), gate_up, activation)
        assert np.isnan(result[0, :2]).all() and np.isfinite(result[0, 2])


@each_implementation
def test_an_unknown_activation_is_refused(impl: Implementation) -> None:
    """The error names it, and what is allowed."""
    with pytest.raises(ValueError, match=r"relu.*silu"):
        impl.result("gated_activation", (1, 2), np.ones((1, 4), np.float32), "relu")


@each_implementation
def test_add(impl: Implementation) -> None:
    """A sum of float32, rounded once; ``out`` may be either argument."""
    x, y = normal(1, 3, 40) * 1000, normal(2, 3, 40)
    assert_same_bits(impl.result("add", x.shape, x, y), x + y)
    first, second = impl.array(x), impl.array(y)
    impl.run("add", first, first, impl.array(y))
    impl.run("add", second, impl.array(x), second)
    assert_same_bits(impl.host(first), x + y)
    assert_same_bits(impl.host(second), x + y)


@each_implementation
def test_gather_rows(impl: Implementation) -> None:
    """Rows in any order and repeated, bit for bit."""
    x, rows = normal(1, 9, 33), np.array([8, 0, 3, 3], np.int32)
    assert_same_bits(impl.result("gather_rows", (4, 33), x, rows), x[rows])
