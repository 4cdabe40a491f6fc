"""The sampler, and its nucleus, against naive ones that sort everything."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.sampling import ENDPOINTS, INF, as_logits, draw, fixed, make_row
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minipage.engine.filters import Candidates, Filters
from minipage.engine.filters import draw as draw_rows
from minipage.engine.sampler import SampledToken, SamplingError, SamplingRow, sample


def naive_weights(logits: np.ndarray, row: SamplingRow) -> list[tuple[int, float]] | None:
    """(id, weight) of the candidates in id order, by full sorts; None where all are masked. Float32 as in the sampler."""
    params, adjusted = row.params, []
    for token_id, z in enumerate(logits):
        z = np.float32(-INF) if token_id in row.banned else z
        if token_id in row.prompt_ids or token_id in row.output_counts:
            penalty = np.float32(params.repetition_penalty)
            z = z / penalty if z > 0 else z * penalty
        if count := row.output_counts.get(token_id):
            z = np.float32(float(z) - (params.presence_penalty + params.frequency_penalty * count))
        adjusted.append(z + np.float32(params.logit_bias.get(token_id, 0.0)))
    ids = sorted(range(len(adjusted)), key=lambda i: (-adjusted[i], i))
    peak = adjusted[ids[0]]
    if peak == -INF:
        return None
    if params.temperature == 0:
        return [(ids[0], 1.0)]
    weights = np.exp((np.array(adjusted) - peak) / np.float32(params.temperature))
    if params.top_k:
        ids = ids[: params.top_k]
    ids.sort(key=lambda i: (-weights[i], i))
    total, mass, count = math.fsum(weights[ids].tolist()), 0.0, 0
    while count < len(ids) and (params.top_p == 1 or count == 0 or mass < params.top_p * total):
        mass += float(weights[ids[count]])
        count += 1
    return sorted((i, float(weights[i])) for i in ids[:count] if weights[i] >= np.float32(params.min_p))


def naive_draw(candidates: list[tuple[int, float]], u: float) -> int:
    """The first id whose cumulative weight exceeds u of the total, or reaches the total."""
    cumulative = np.cumsum([weight for _, weight in candidates]).tolist()
    total = cumulative[-1]
    return next(i for (i, _), c in zip(candidates, cumulative, strict=True) if c > u * total or c == total)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, SamplingRow, float]:
    """Logits [1, V] with ties and masks, a request with any settings, and a uniform."""
    size = draw(st.integers(1, 40))
    steps = st.integers(-24, 24).map(lambda i: i / 4)
    value = st.one_of(steps, steps, st.floats(-15, 15, width=32), st.just(-INF))
    ids = st.lists(st.integers(0, size - 1), max_size=6)
    params = {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.3, 5.0])),
        "top_k": draw(st.sampled_from([0, 1, 2, 3, 10, 1000])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.7, 1.5])),
        "presence_penalty": draw(st.sampled_from([0.0, -1.0, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.5, 0.4])),
        "logit_bias": draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from([-INF, -3.5, 2.0]), max_size=3)),
    }
    logits = as_logits(*draw(st.lists(value, min_size=size, max_size=size)))
    row = make_row(prompt=draw(ids), output=draw(ids), banned=draw(ids), **params)
    return logits, row, draw(st.one_of(st.sampled_from(ENDPOINTS), st.floats(0, 1)))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_equals_the_naive_sampler(case: tuple[np.ndarray, SamplingRow, float]) -> None:
    """The chosen token is that of an implementation that sorts and loops, for any row, settings and uniform."""
    logits, row, u = case
    assume(np.max(logits) > -INF)
    before = logits.copy()
    (token,) = sample(logits, [row], fixed(u))
    candidates = naive_weights(logits[0], row)
    if candidates is None:
        assert isinstance(token, SamplingError)
    else:
        assert token == SampledToken(naive_draw(candidates, u))
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("scale", [0.0, 0.5, 6.0], ids=["equal", "flat", "peaked"])
@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9}, {"top_p": 0.999999}, {"top_k": 300}, {"top_k": 700, "top_p": 0.5, "min_p": 0.01}],
    ids=str,
)
def test_equals_the_naive_sampler_on_large_vocabularies(params: dict[str, Any], scale: float) -> None:
    """The same with several blocks of candidates and a nucleus of hundreds of tokens."""
    rng = np.random.default_rng(5)
    logits = (scale * rng.standard_normal((1, 1500))).astype(np.float32)
    candidates = naive_weights(logits[0], make_row(**params))
    for u in (*rng.random(40), 0.0, 1.0):
        assert draw(logits, make_row(**params), u) == naive_draw(candidates, u)


def plain_nucleus(logits: np.ndarray, top_p: float) -> set[int]:
    """The tokens of a nucleus by its definition: all of the row sorted, and summed from the heaviest on."""
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights, kind="stable")
    mass = weights[order].cumsum(dtype=np.float64)
    count = 1 + int((mass[:-1] < top_p * weights.sum(dtype=np.float64)).sum())
    return set(order[:count].tolist())


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 0.9999999, 1 - 2.0**-53])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("size", [300, 5000, 70_000])
def test_a_nucleus_of_any_width_is_the_plain_one(size: int, spread: float, top_p: float) -> None:
    """Flat rows and steep ones, and rows with many equal logits: the last token of a nucleus is drawn, none beyond it."""
    rng = np.random.default_rng(size)
    smooth = (spread * rng.standard_normal(size)).astype(np.float32)
    for logits in (smooth, np.round(smooth * 4) / 4):
        nucleus = plain_nucleus(logits, top_p)
        [last] = draw_rows([Candidates(None, logits)], Filters(1.0, 0, top_p, 0.0), [1.0])
        assert last == max(nucleus)
        drawn = draw_rows([Candidates(None, logits)] * 50, Filters(1.0, 0, top_p, 0.0), rng.random(50).tolist())
        assert set(drawn) <= nucleus
