"""Logprobs and ranks of tokens that are drawn or known: those of the raw row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from helpers.sampling import INF, as_logits, fixed, make_row, softmax

from minipage.engine.sampler import SampledToken, SamplingError, prompt_logprobs, sample

KNOWN = (1.0, 3.0, -2.0, 3.0, 0.0, -INF)
KNOWN_LOGPROBS = np.log(np.maximum(softmax(KNOWN), 1e-300))
KNOWN_RANKS = (3, 1, 5, 1, 4, 6)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.1},
        {"temperature": 5.0},
        {"top_p": 1e-4},
        {"top_k": 1},
        {"top_k": 2, "min_p": 0.9},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {2: 50.0}},
        {"logit_bias": {1: -INF, 3: -INF, 0: -INF}},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_top", [0, 1, 3, 6, 100])
def test_logprobs_are_those_of_the_raw_row(params: dict[str, Any], num_top: int) -> None:
    """Whatever shapes the draw, logprobs and ranks are those of the raw softmax, and the drawn token is among them."""
    row = make_row(prompt=[1, 3], output=[1, 1], logprobs=num_top, **params)
    for u in (0.0, 0.3, 0.7, 1.0):
        (token,) = sample(as_logits(*KNOWN), [row], fixed(u))
        assert token.logprob == pytest.approx(KNOWN_LOGPROBS[token.token_id], abs=1e-6)
        assert token.rank == KNOWN_RANKS[token.token_id]
        likeliest = [1, 3, 0, 4, 2, 5][:num_top]
        outside = [] if token.token_id in likeliest else [token.token_id]
        assert [token_id for token_id, _, _ in token.top] == likeliest + outside
        for token_id, logprob, rank in token.top:
            assert logprob == (-INF if token_id == 5 else pytest.approx(KNOWN_LOGPROBS[token_id], abs=1e-6))
            assert rank == KNOWN_RANKS[token_id]
        assert (token.token_id, token.logprob, token.rank) in token.top
        assert math.fsum(math.exp(logprob) for _, logprob, _ in token.top) <= 1 + 1e-6


def test_without_logprobs_there_are_none() -> None:
    """logprobs=None gives no logprob, no rank and no top, and the same token as with them."""
    logits = np.random.default_rng(0).standard_normal((8, 61)).astype(np.float32)
    rows = [make_row(seed=i) for i in range(8)]
    with_logprobs = [row._replace(params=dataclasses.replace(row.params, logprobs=4)) for row in rows]
    assert sample(logits, rows) == [SampledToken(token.token_id) for token in sample(logits, with_logprobs)]


@pytest.mark.parametrize(("high", "low"), [(1e4, -1e4), (-1e4, -2e4), (1e30, -1e30)])
@pytest.mark.filterwarnings("error")
def test_logprobs_of_large_logits(high: float, low: float) -> None:
    """Logits of any magnitude give finite logprobs of the likely tokens, as exact as float64's."""
    (token,) = sample(as_logits(high, high, low), [make_row(logprobs=3)], fixed(0.9))
    assert (token.token_id, token.rank) == (1, 1)
    assert token.logprob == pytest.approx(-math.log(2), abs=1e-12)
    assert token.top[2][1:] == (pytest.approx(low - high - math.log(2), rel=1e-7), 3)


def test_prompt_logprobs() -> None:
    """Each known token has its raw logprob, true rank and the likeliest; a broken row is an error in its place."""
    rng = np.random.default_rng(11)
    logits = (4 * rng.standard_normal((12, 61))).astype(np.float32)
    token_ids = rng.integers(0, 61, 12).tolist()
    logits[5, 3] = math.nan
    scored = prompt_logprobs(logits, token_ids, 2)
    assert isinstance(scored.pop(5), SamplingError)
    for token, row, token_id in zip(scored, np.delete(logits, 5, axis=0), np.delete(token_ids, 5), strict=True):
        expected = np.log(softmax(row.tolist()))
        order = np.argsort(-row).tolist()
        assert token.token_id == token_id
        assert token.logprob == pytest.approx(expected[token_id], abs=1e-6)
        assert token.rank == order.index(token_id) + 1
        assert [entry[0] for entry in token.top[:2]] == order[:2]
        assert (token.token_id, token.logprob, token.rank) in token.top
        assert len(token.top) == 2 + (token.rank > 2)


def test_top_logprobs_of_equal_logits_are_the_lowest_ids() -> None:
    """Among equal logits the top lists the lowest ids in their order, all of one rank, and the drawn token after them."""
    logits = np.random.default_rng(2).integers(0, 12, (1, 600)).astype(np.float32)
    likeliest = sorted(range(600), key=lambda i: (-logits[0, i], i))[:100]
    unlikely = int(logits.argmin())
    (token,) = sample(logits, [make_row(logprobs=100, logit_bias={unlikely: 50})], fixed(0.5))
    assert [token_id for token_id, _, _ in token.top] == [*likeliest, unlikely]
    assert [rank for _, _, rank in token.top] == [
        1 + int((logits > logits[0, i]).sum()) for i in (*likeliest, unlikely)
    ]
