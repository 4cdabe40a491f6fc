"""The sampler against a naive one that sorts everything, and the rules that it must keep whatever the row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minipage.engine.filters import Candidates, Filters
from minipage.engine.filters import draw as draw_rows
from minipage.engine.sampler import SampledToken, SamplingError, SamplingRow, prompt_logprobs, sample
from minipage.sampling_params import SamplingParams

INF = math.inf
ENDPOINTS = (0.0, 2.0**-32, 1 - 2.0**-24, 1.0)


def make_row(
    prompt: Sequence[int] = (), output: Sequence[int] = (), banned: Sequence[int] = (), seed: int = 1, **params: Any
) -> SamplingRow:
    """A row of a request; its position is the length of its output."""
    return SamplingRow(SamplingParams(**params), seed, 0, len(output), prompt, output, frozenset(banned))


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


def probabilities(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """How much of [0, 1] picks each token: the distribution that is sampled, found by bisection."""
    edges = [0.0]
    for token_id in range(logits.shape[1]):
        low, high = edges[-1], 1.0
        for _ in range(45):
            middle = (low + high) / 2
            low, high = (middle, high) if draw(logits, row, middle) <= token_id else (low, middle)
        edges.append(low if draw(logits, row, 1.0) > token_id else 1.0)
    return np.diff(edges)


def softmax(values: Sequence[float]) -> np.ndarray:
    """In float64."""
    weights = np.exp(np.array(values, dtype=np.float64) - max(values))
    return weights / weights.sum()


# ---- the whole pipeline ----------------------------------------------------------------------------------------------


def naive_weights(logits: np.ndarray, row: SamplingRow) -> list[tuple[int, float]] | None:
    """(id, weight) of the candidates in id order, by full sorts; None where all are masked. Float32 as in the sampler."""
    params, adjusted = row.params, []
    for token_id, z in enumerate(logits):
        z = np.float32(-INF) if token_id in row.banned else z
        if token_id in row.prompt_token_ids or token_id in row.output_token_ids:
            penalty = np.float32(params.repetition_penalty)
            z = z / penalty if z > 0 else z * penalty
        if count := list(row.output_token_ids).count(token_id):
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


# ---- penalties, bias, filters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "adjusted"),
    [
        (make_row(prompt=[0, 1, 0], repetition_penalty=2.0), [1.0, -4.0, 0.5]),
        (make_row(prompt=[0], output=[1, 1], repetition_penalty=2.0), [1.0, -4.0, 0.5]),
        (make_row(prompt=[0, 1], presence_penalty=1.0, frequency_penalty=0.5), [2.0, -2.0, 0.5]),
        (make_row(prompt=[0], output=[2, 1, 2], presence_penalty=1.0), [2.0, -3.0, -0.5]),
        (make_row(prompt=[0], output=[2, 1, 2], frequency_penalty=0.5), [2.0, -2.5, -0.5]),
        (make_row(output=[0], repetition_penalty=2.0, presence_penalty=0.5, logit_bias={0: 1.0}), [1.5, -2.0, 0.5]),
        (make_row(logit_bias={1: 3.0, 2: -INF}), [2.0, 1.0, -INF]),
        (make_row(prompt=[0], repetition_penalty=2.0, temperature=0.5), [2.0, -4.0, 1.0]),
        (make_row(output=[1], banned=[1], presence_penalty=-2.0, logit_bias={1: 50.0}), [2.0, -INF, 0.5]),
        (
            make_row(prompt=[7], output=[3, 3], banned=[9], repetition_penalty=2.0, logit_bias={3: 1.0}),
            [2.0, -2.0, 0.5],
        ),
    ],
)
def test_penalties_bias_and_bans(row: SamplingRow, adjusted: list[float]) -> None:
    """Repetition counts prompt and output, the others outputs only; ids beyond V are ignored."""
    assert probabilities(as_logits(2.0, -2.0, 0.5), row) == pytest.approx(softmax(adjusted), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.57}, [1]),
        ({"min_p": 0.24}, [0, 1, 2, 3]),
        ({"min_p": 0.26}, [0, 1, 2]),
        ({"min_p": 1.0}, [1]),
    ],
    ids=str,
)
def test_filters(params: dict[str, Any], kept: list[int]) -> None:
    """top_k keeps the lower of two equal ids, top_p the token that crosses, of what top_k left; min_p is relative."""
    weights = [0.15, 0.4, 0.3, 0.1, 0.05]
    weights[0] = 0.15 if params.get("top_k") != 3 else 0.1  # then ids 0 and 3 tie
    expected = [weights[i] if i in kept else 0.0 for i in range(5)]
    found = probabilities(np.log(np.array([weights], dtype=np.float32)), make_row(**params))
    assert found == pytest.approx(np.array(expected) / sum(expected), abs=1e-6)
    assert [i for i in range(5) if found[i] > 0] == kept


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e9, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    """Very cold is greedy that draws among exact ties, very hot is uniform over what is not masked; neither overflows."""
    kept = [1, 3] if temperature < 1 else [0, 1, 3, 4]
    expected = [1 / len(kept) if i in kept else 0.0 for i in range(5)]
    row = make_row(temperature=temperature)
    assert probabilities(as_logits(0.0, 3e5, -INF, 3e5, 1.0), row) == pytest.approx(expected, abs=1e-3)


# ---- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"top_k": 1}, {"top_k": 1, "temperature": 5.0, "top_p": 0.3}], ids=str
)
@pytest.mark.parametrize(
    ("logits", "best"), [((1, 1, 0), 0), ((0, 1, 1), 1), ((-0.0, 0.0, -1), 0), ((-INF, -1e30, -1e30), 1)], ids=str
)
def test_greedy_takes_the_lowest_of_equal_ids(params: dict[str, Any], logits: tuple[float, ...], best: int) -> None:
    """temperature=0 and top_k=1 give the lowest id of the largest logits, at any uniform."""
    assert {draw(as_logits(*logits), make_row(**params), u) for u in ENDPOINTS} == {best}


def test_greedy_sees_penalties_and_bans() -> None:
    """The largest logit is that after bans, penalties and bias."""
    logits = as_logits(3.0, 2.0, 1.0)
    assert draw(logits, make_row(temperature=0, banned=[0]), 0.5) == 1
    assert draw(logits, make_row(temperature=0, prompt=[0], repetition_penalty=2.0), 0.5) == 1
    assert draw(logits, make_row(temperature=0, logit_bias={2: 2.5}), 0.5) == 2


# ---- rows on their own -----------------------------------------------------------------------------------------------

MIXED = [
    {"temperature": 0, "logprobs": 2},
    {"top_k": 1, "logprobs": 0},
    {"top_p": 1e-6},
    {"temperature": 5.0, "logprobs": 3},
    {"min_p": 0.5},
    {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 5},
    {"top_k": 20, "top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.99, "temperature": 2.0, "logprobs": 1},
]


@pytest.mark.parametrize("vocab_size", [61, 1001, 20011])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    """Token, logprobs and ranks of each row are bit for bit those it has alone, at any place among any neighbours."""
    rng = np.random.default_rng(3)
    asked = MIXED * 5  # of those that want the same, more and fewer than are drawn together
    scales = np.resize([3, 0.3, 9], (len(asked), 1))  # distributions of any width
    padded = (scales * rng.standard_normal((len(asked), vocab_size + 3))).astype(np.float32)
    logits = padded[:, :vocab_size]  # rows of a padded lm_head: not contiguous, not aligned
    logits[0, 7] = logits[0, 11] = logits[0].max() + 1
    rows = [make_row(prompt=range(9), output=[3, 3, 8], seed=i, **params) for i, params in enumerate(asked)]
    alone = [sample(logits[i : i + 1].copy(), [row])[0] for i, row in enumerate(rows)]
    assert alone[0].token_id == 7
    for shift in range(0, len(rows), 3):
        order = [(i + shift) % len(rows) for i in range(len(rows))]
        assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
        some = order[: shift + 1]
        assert sample(logits[some], [rows[i] for i in some]) == [alone[i] for i in some]
    assert sample(logits, rows) == alone


def test_the_draw_depends_on_seed_child_and_position() -> None:
    """Equal places give equal tokens, and each of seed, child and position changes the sequence."""
    logits = np.zeros((64, 61), dtype=np.float32)

    def tokens(seed: int, child: int, first: int) -> list[SampledToken | SamplingError]:
        return sample(logits, [SamplingRow(SamplingParams(), seed, child, first + i, (), ()) for i in range(64)])

    sequences = [tokens(1234, 0, 0), tokens(1235, 0, 0), tokens(1234, 1, 0), tokens(1234, 0, 64)]
    assert all(a != b for i, a in enumerate(sequences) for b in sequences[:i])
    assert tokens(1234, 0, 32)[:32] == sequences[0][32:]


def test_an_empty_batch_gives_nothing() -> None:
    """No rows, no tokens; a row more or less than there are logits is an error of the caller."""
    assert sample(np.zeros((0, 61), dtype=np.float32), []) == []
    with pytest.raises(ValueError, match="zip"):
        sample(np.zeros((2, 61), dtype=np.float32), [make_row()])


# ---- masks and broken rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 61, 256, 257, 1000])
@pytest.mark.parametrize("u", ENDPOINTS)
def test_a_masked_token_is_never_drawn(size: int, u: float) -> None:
    """At the ends of [0, 1] the drawn token is allowed: by the row's -inf, by bans, by bias, by top_k, by underflow."""
    allowed = sorted({size // 3, size // 2, size - 2})
    logits = np.full((1, size), -INF, dtype=np.float32)
    logits[0, allowed] = 1.0
    flat, peaks = np.zeros_like(logits), np.where(logits == 1.0, np.float32(500), np.float32(0))
    others = [i for i in range(size) if i not in allowed]
    tokens = [
        draw(logits, make_row(), u),
        draw(flat, make_row(banned=others), u),
        draw(flat, make_row(logit_bias=dict.fromkeys(others, -INF)), u),
        draw(logits, make_row(top_k=2), u),
        draw(peaks, make_row(top_k=len(allowed)), u),
        draw(peaks, make_row(), u),
        draw(peaks, make_row(top_p=0.999), u),
        draw(peaks, make_row(min_p=0.1), u),
    ]
    assert set(tokens) <= set(allowed)
    assert tokens[0] == (allowed[0] if u < 0.5 else allowed[-1])


def test_frequencies() -> None:
    """Of 200,000 draws from 61 tokens with 3 allowed, each allowed one has its softmax share within 4 sigma."""
    count, allowed = 200_000, {5: 1.0, 30: 0.0, 60: -1.5}
    logits = np.full((61,), -INF, dtype=np.float32)
    logits[list(allowed)] = list(allowed.values())
    params, batch, token_ids = SamplingParams(), np.broadcast_to(logits, (1000, 61)), []
    for first in range(0, count, 1000):
        rows = [SamplingRow(params, 99, 0, first + i, (), ()) for i in range(1000)]
        token_ids += [token.token_id for token in sample(batch, rows)]
    counts = np.bincount(token_ids, minlength=61)
    assert counts[list(allowed)].sum() == count
    for token_id, share in zip(allowed, softmax(list(allowed.values())), strict=True):
        assert abs(counts[token_id] - share * count) < 4 * math.sqrt(count * share * (1 - share))


BROKEN = [
    ((0.0, math.nan, 1.0), make_row(), "the logit of token 1 is nan"),
    ((-INF, math.nan, INF), make_row(temperature=0), "the logit of token 1 is nan"),
    ((0.0, INF, 1.0), make_row(temperature=0), "the logit of token 1 is inf"),
    ((0.0, 0.0, math.nan), make_row(banned=[2], top_k=1), "the logit of token 2 is nan"),
    ((-INF, -INF, -INF), make_row(), "all 3 logits are -inf or masked"),
    ((-INF, 1.0, 2.0), make_row(temperature=0, banned=[1, 2]), "all 3 logits are -inf or masked"),
    ((0.0, 1.0, 2.0), make_row(logit_bias={0: -INF, 1: -INF, 2: -INF}), "all 3 logits are -inf or masked"),
    ((3e38, 0.0, 0.0), make_row(prompt=[0], repetition_penalty=0.5), "the logit of token 0 is inf"),
]


@pytest.mark.parametrize(("values", "row", "message"), BROKEN)
@pytest.mark.filterwarnings("error")
def test_a_broken_row_is_an_error_of_its_own(values: tuple[float, ...], row: SamplingRow, message: str) -> None:
    """NaN, +inf or nothing left gives an error in the row's place, never token 0, and its neighbours their tokens."""
    logits = np.concatenate([as_logits(0.0, 1.0, 5.0), as_logits(*values), as_logits(0.0, 1.0, 5.0)])
    good = make_row(seed=4, logprobs=2)
    first, error, last = sample(logits, [good, row, good])
    assert isinstance(error, SamplingError)
    assert message in str(error)
    assert [first] == [last] == sample(logits[:1], [good])


# ---- logprobs --------------------------------------------------------------------------------------------------------

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


# ---- wide nuclei -----------------------------------------------------------------------------------------------------


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
