"""The sampler: formulas by hand, and the rules that it must keep whatever the row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.sampling import ENDPOINTS, INF, as_logits, draw, make_row, softmax

from minipage.engine.sampler import SampledToken, SamplingError, SamplingRow, sample
from minipage.sampling_params import SamplingParams


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
        return sample(logits, [SamplingRow(SamplingParams(), seed, child, first + i) for i in range(64)])

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
        rows = [SamplingRow(params, 99, 0, first + i) for i in range(1000)]
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
