"""rms_norm and layer_norm, every implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.kernels import Implementation, assert_same_bits, cases, compare, each_implementation, normal

Array = Any

SHAPES = [(1, 1), (1, 8), (3, 33), (2, 576), (33, 576), (5, 4096)]
SMALL_SHAPES = [(1, 1), (3, 33), (2, 300)]


def rms_norm_formula(x: Array, weight: Array, eps: float) -> Array:
    """Float64."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm_formula(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Float64."""
    x = x.astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


@cases(SHAPES, SMALL_SHAPES)
def test_rms_norm(impl: Implementation, case: tuple[int, int]) -> None:
    """The root mean square norm is its formula."""
    x, weight = normal(1, *case), normal(2, case[1])
    compare(
        impl, lambda i: i.result("rms_norm", case, x, weight, 1e-5), lambda: rms_norm_formula(x, weight, 1e-5), 2e-6
    )


@cases(SHAPES, SMALL_SHAPES)
def test_layer_norm(impl: Implementation, case: tuple[int, int]) -> None:
    """The layer norm is its formula."""
    x, weight, bias = normal(1, *case) + 3, normal(2, case[1]), normal(3, case[1])
    compare(
        impl,
        lambda i: i.result("layer_norm", case, x, weight, bias, 1e-5),
        lambda: layer_norm_formula(x, weight, bias, 1e-5),
        1e-5,
    )


@cases([(m, e) for m in (300, 7600, 1e-3) for e in (1e-5, 1e-6)], [(300, 1e-5), (7600, 1e-6)])
def test_norms_keep_float32_accuracy_at_any_magnitude(impl: Implementation, case: tuple[float, float]) -> None:
    """Magnitudes whose squares overflow half precision, and those near eps, are as exact as others."""
    magnitude, eps = case
    shape = (2, 64) if impl.simulated else (3, 4096)
    x, weight, bias = normal(1, *shape) * np.float32(magnitude), normal(2, shape[1]), normal(3, shape[1])
    compare(impl, lambda i: i.result("rms_norm", shape, x, weight, eps), lambda: rms_norm_formula(x, weight, eps), 2e-6)
    compare(
        impl,
        lambda i: i.result("layer_norm", shape, x, weight, bias, eps),
        lambda: layer_norm_formula(x, weight, bias, eps),
        5e-6,
    )


@each_implementation
def test_norms_work_in_place(impl: Implementation) -> None:
    """``out`` may be ``x``."""
    x, weight, bias = normal(1, 3, 40), normal(2, 40), normal(3, 40)
    for op, vectors in (("rms_norm", (weight,)), ("layer_norm", (weight, bias))):
        expected = impl.result(op, x.shape, x, *vectors, 1e-5)
        both = impl.array(x)
        impl.run(op, both, both, *map(impl.array, vectors), 1e-5)
        assert_same_bits(impl.host(both), expected)


@cases(SHAPES, SMALL_SHAPES)
def test_add_rms_norm(impl: Implementation, case: tuple[int, int]) -> None:
    """The addition and the norm in one, with the bits of the two; ``out`` may be ``x``."""
    h, x, weight = normal(1, *case), normal(2, *case), normal(3, case[1])
    total, both = impl.array(h), impl.array(x)
    impl.run("add_rms_norm", both, total, both, impl.array(weight), 1e-5)
    assert_same_bits(impl.host(total), h + x)
    assert_same_bits(impl.host(both), impl.result("rms_norm", case, h + x, weight, 1e-5))


@each_implementation
def test_a_row_does_not_depend_on_the_others(impl: Implementation) -> None:
    """A token's norm has the same bits alone and in a batch that is large enough to be shared among threads."""
    shape = (3, 40) if impl.simulated else (40, 576)
    x, weight, bias = normal(1, *shape), normal(2, shape[1]), normal(3, shape[1])
    for op, vectors in (("rms_norm", (weight,)), ("layer_norm", (weight, bias))):
        together = impl.result(op, shape, x, *vectors, 1e-5)
        for t in range(shape[0]):
            assert_same_bits(impl.result(op, (1, shape[1]), x[t : t + 1], *vectors, 1e-5), together[t : t + 1])


@each_implementation
def test_rms_norm_of_nan_is_nan(impl: Implementation) -> None:
    """A NaN spoils its own row, all of it, and no other."""
    x = normal(1, 2, 8)
    x[0, 3] = np.nan
    result = impl.result("rms_norm", x.shape, x, np.ones(8, np.float32), 1e-5)
    assert np.isnan(result[0]).all() and np.isfinite(result[1]).all()
