"""Rows for tests of the sampler: requests and logits in a line, and the uniform that a draw is to get."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minipage.engine.sampler import Biases, SampledToken, SamplingRow, as_ids, sample
from minipage.sampling_params import SamplingParams

INF = math.inf
ENDPOINTS = (0.0, 2.0**-32, 1 - 2.0**-24, 1.0)


def make_row(
    prompt: Sequence[int] = (), output: Sequence[int] = (), banned: Sequence[int] = (), seed: int = 1, **params: Any
) -> SamplingRow:
    """A row of a request; its position is the length of its output."""
    asked = SamplingParams(**params)
    known = np.unique(as_ids(prompt)), Counter(output), as_ids(banned)
    return SamplingRow(asked, seed, 0, len(output), *known, Biases.of(asked))


def as_logits(*values: float) -> np.ndarray:
    """One row of logits [1, V]."""
    return np.array([values], dtype=np.float32)


def fixed(u: float) -> Callable[[int, int, int], float]:
    """A source of uniforms that gives u."""
    return lambda seed, child, position: u


def draw(logits: np.ndarray, row: SamplingRow, u: float) -> int:
    """The token that u picks from logits [1, V]."""
    (token,) = sample(logits, [row], fixed(u))
    assert isinstance(token, SampledToken)
    return token.token_id


def softmax(values: Sequence[float]) -> np.ndarray:
    """In float64."""
    weights = np.exp(np.array(values, dtype=np.float64) - max(values))
    return weights / weights.sum()
