"""paged_attention, every implementation: scores that are many, large, infinite or no numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.kernels import Implementation, compare, each_implementation
from helpers.paged import Problem

Array = Any


@each_implementation
def test_long_softmax(impl: Implementation) -> None:
    """The softmax over 2,000 keys is exact to float32, also where scores are large."""
    problem = Problem(1, 1, 4 if impl.simulated else 64, 16, (300 if impl.simulated else 2000,), (1,))
    compare(impl, problem.attend, problem.formula, 1e-5)


def one_score_each(impl: Implementation, scores: Array, values: Array) -> Array:
    """Attention of one query that gives token t the score scores[t] and reads values[t]; blocks of 4 tokens."""
    count = len(scores)
    keys = np.zeros((-(-count // 4), 1, 4, 4), np.float32)
    numbers = np.zeros_like(keys)
    for t in range(count):
        keys[t // 4, 0, t % 4, 0] = scores[t]
        numbers[t // 4, 0, t % 4] = values[t]
    q = np.array([[[1, 0, 0, 0]]], np.float32)
    out = impl.array(np.full(q.shape, np.nan, np.float32))
    lengths = np.arange(len(keys), dtype=np.int32)[None], np.array([count], np.int32), np.array([0, 1], np.int32)
    pages = impl.key_pages(keys, "float32"), impl.value_pages(numbers, "float32")
    impl.run("paged_attention", out, impl.array(q), *pages, *map(impl.array, lengths), 1.0, 0, 0.0)
    return impl.host(out)[0, 0]


@each_implementation
@pytest.mark.parametrize("count", [5, 40, 300])
def test_scores_of_minus_infinity_have_no_weight(impl: Implementation, count: int) -> None:
    """Also where a whole chunk of the context has no other score; and NaN, not a number, where nothing has."""
    scores = np.full(count, -np.inf, np.float32)
    values = np.arange(count, dtype=np.float32)
    assert np.isnan(one_score_each(impl, scores, values)).all()
    scores[-2:] = 1.0
    np.testing.assert_allclose(one_score_each(impl, scores, values), count - 1.5)
    np.testing.assert_allclose(one_score_each(impl, scores[::-1], values), 0.5)


@each_implementation
@pytest.mark.parametrize("count", [5, 300])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_scores_and_values_show(impl: Implementation, count: int, bad: float) -> None:
    """A NaN in the context, or an infinity that a softmax cannot weigh, comes out as NaN and is not hidden."""
    scores, values = np.zeros(count, np.float32), np.ones(count, np.float32)
    for place in (0, count // 2, count - 1):
        broken = scores.copy()
        broken[place] = bad
        assert np.isnan(one_score_each(impl, broken, values)).all()
    whole_chunk = scores.copy()
    whole_chunk[: count // 2] = np.nan
    assert np.isnan(one_score_each(impl, whole_chunk, values)).all()
    broken = values.copy()
    broken[1] = bad
    assert not np.isfinite(one_score_each(impl, scores, broken)).any()


@each_implementation
def test_large_scores(impl: Implementation) -> None:
    """Scores of +-1e4 neither overflow nor lose the largest."""
    scores, values = np.linspace(-1e4, 1e4, 41).astype(np.float32), np.arange(41, dtype=np.float32)
    np.testing.assert_allclose(one_score_each(impl, scores, values), 40)
    np.testing.assert_allclose(one_score_each(impl, scores[::-1], values), 0)
