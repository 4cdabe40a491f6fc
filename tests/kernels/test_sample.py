"""sample, every implementation that has it, against the sampler of the engine, which has logits on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.kernels import IMPLEMENTATIONS, REFERENCE, Implementation, assert_same_bits

from minipage.engine.drawing import records
from minipage.engine.sampler import SampledToken, SamplingRow
from minipage.engine.sampler import sample as host_sample
from minipage.kernels.draws import as_words
from minipage.sampling_params import SamplingParams

Array = Any
INF = math.inf
SAMPLERS = [impl for impl in IMPLEMENTATIONS if impl.device.ops.SAMPLES]
each_sampler = pytest.mark.parametrize("impl", SAMPLERS, ids=repr)


@pytest.fixture(autouse=True)
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated threads run in another order at each barrier."""
    monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", "1")


def request(seed: int, child: int = 0, position: int = 0, **params: Any) -> SamplingRow:
    """What is asked of a row."""
    return SamplingRow(SamplingParams(**params), seed, child, position)


def on_device(impl: Implementation, logits: Array, rows: list[SamplingRow]) -> list[int]:
    """The token of each row, or -1."""
    out = impl.array(np.full(len(rows), -2, np.int32))
    impl.run("sample", out, impl.array(logits), impl.array(as_words(records(rows))))
    tokens: list[int] = impl.host(out).tolist()
    return tokens


def on_host(logits: Array, rows: list[SamplingRow]) -> list[int]:
    """The same by the engine's sampler."""
    return [token.token_id if isinstance(token, SampledToken) else -1 for token in host_sample(logits, rows)]


def any_logits(rng: np.random.Generator, size: int) -> Array:
    """A row with ties, masks, zeros of both signs, or any numbers at all."""
    kind = rng.integers(5)
    if kind == 0:
        row = rng.integers(-20, 20, size) / 4
    elif kind == 1:
        row = np.zeros(size)
    elif kind == 2:
        row = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 5)
    else:
        row = rng.standard_normal(size) * 3
    if rng.random() < 0.3:
        row[rng.random(size) < 0.5] = -INF
    if rng.random() < 0.2:
        row[rng.random(size) < 0.3] = -0.0
    row[rng.integers(size)] = max(row.max(), -1e30)
    return row.astype(np.float32)


def any_request(rng: np.random.Generator, seed: int) -> SamplingRow:
    """Any of the settings that a row may have."""
    return request(
        seed,
        child=int(rng.integers(4)),
        position=int(rng.integers(1000)),
        temperature=rng.choice([0.0, 0.1, 0.7, 1.0, 1.0, 2.0, 50.0, 1e-300, 1e300]),
        top_k=int(rng.choice([0, 0, 1, 2, 3, 10, 40, 1000])),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-6, 0.999999, 1e-30]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
    )


@each_sampler
@pytest.mark.parametrize("size", [1, 2, 5, 64, 129, 400])
def test_draws_what_the_host_draws(impl: Implementation, size: int) -> None:
    """The same token from the same logits, whatever they and the settings are."""
    rng = np.random.default_rng(size)
    count = (30 if size < 100 else 8) if impl.simulated else 400
    logits = np.stack([any_logits(rng, size) for _ in range(count)])
    rows = [any_request(rng, seed) for seed in rng.integers(-(2**63), 2**63, count).tolist()]
    assert on_device(impl, logits, rows) == on_host(logits, rows)


@each_sampler
def test_ties_go_to_the_lowest_ids(impl: Implementation) -> None:
    """Greedy, top_k and top_p, where equal logits lie on both sides of the limit; -0 and 0 are equal."""
    row = np.tile(np.array([1.0, 2.0, -0.0, 2.0, 0.0, 1.0], np.float32), 12)
    settings = [
        {"temperature": 0.0},
        {"top_k": 1, "temperature": 5.0},
        *[{"top_k": count} for count in (2, 23, 24, 25, 40, 50, 71, 72, 73)],
        *[{"top_p": part} for part in (1e-6, 0.1, 0.49, 0.5, 0.9)],
        *[{"top_k": 40, "top_p": part, "temperature": 3.0} for part in (0.3, 0.97)],
    ]
    rows = [request(7 * seed, **params) for seed, params in enumerate(settings)]
    tokens = on_device(impl, np.tile(row, (len(rows), 1)), rows)
    assert tokens == on_host(np.tile(row, (len(rows), 1)), rows)
    assert tokens[:2] == [1, 1]


@each_sampler
def test_top_k_of_about_as_many_tokens_as_a_block_has_threads(impl: Implementation) -> None:
    """The least likely of them are drawn as well, and none behind them."""
    size, threads = (300, 64) if impl.simulated else (5000, 1024)
    rows = [request(i, top_k=threads + i % 5 - 2, temperature=50.0) for i in range(25)]
    rows += [request(i, top_k=2 * threads, temperature=50.0) for i in range(5)]
    logits = np.random.default_rng(0).standard_normal((len(rows), size)).astype(np.float32)
    logits[::2, threads:] = -3  # the largest of all threads but some are in the first tokens
    assert on_device(impl, logits, rows) == on_host(logits, rows)


@each_sampler
def test_a_limit_among_equal_logits_keeps_the_first(impl: Implementation) -> None:
    """Of equal logits, as -0 and 0 are, the k lowest ids are drawn and no other, by top_k and by the top_p that means as many."""
    flat, seeds = np.zeros((12, 70), np.float32), range(12)
    flat[:, ::2] = -0.0
    for params in ({"top_k": 3}, {"top_p": 2.5 / 70}):
        assert set(on_device(impl, flat, [request(seed, **params) for seed in seeds])) == {0, 1, 2}
    assert on_device(impl, flat[:1], [request(1, temperature=0.0)]) == [0]


@each_sampler
def test_rows_without_a_token(impl: Implementation) -> None:
    """NaN of either sign, +inf, or nothing but -inf give -1, greedy or not, and leave the other rows alone."""
    logits = np.random.default_rng(3).standard_normal((9, 70)).astype(np.float32)
    logits[1, 69] = logits[2, 0] = np.nan
    logits[3, 5] = -np.float32(np.nan)
    logits[4, 33], logits[5], logits[6, 1:] = INF, -INF, -INF
    logits[7, 3], logits[7, 4] = np.nan, INF
    for params in ({"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}):
        rows = [request(seed, **params) for seed in range(9)]
        tokens = on_device(impl, logits, rows)
        assert [token < 0 for token in tokens] == [False, *[True] * 5, False, True, False]
        assert tokens == on_host(logits, rows)
        assert tokens[6] == 0


@each_sampler
def test_a_row_does_not_depend_on_its_batch(impl: Implementation) -> None:
    """Each row gets the token that it gets alone, and logits stay as they are."""
    rng = np.random.default_rng(5)
    logits = np.stack([any_logits(rng, 67) for _ in range(8)])
    rows = [any_request(rng, seed) for seed in range(8)]
    together = on_device(impl, logits, rows)
    assert together == [on_device(impl, logits[i : i + 1], rows[i : i + 1])[0] for i in range(8)]
    given = impl.array(logits)
    impl.run("sample", impl.array(np.zeros(8, np.int32)), given, impl.array(as_words(records(rows))))
    assert_same_bits(impl.host(given), logits)


@each_sampler
def test_seed_child_and_position(impl: Implementation) -> None:
    """The random number depends on all bits of each."""
    flat = np.zeros((10, 1000 if not impl.simulated else 200), np.float32)
    rows = [request(seed, child, position) for seed in (0, 2**32, -1, 2**63) for child, position in ((0, 1), (1, 0))]
    rows += [request(0, 127, 2**31), request(2**64 - 1, 0, 1)]
    tokens = on_device(impl, flat, rows)
    assert tokens == on_host(flat, rows)
    assert tokens[4] == tokens[9] and len(set(tokens)) > 7


@pytest.mark.parametrize("impl", [i for i in SAMPLERS if i is not REFERENCE], ids=repr)
def test_huge_vocabularies_are_refused(impl: Implementation) -> None:
    """Those for which sums have no room; the reference adds floats."""
    logits = impl.device.empty((0, 2**22 + 1), np.float32)
    with pytest.raises(ValueError, match="4194305 tokens"):
        impl.run("sample", None, logits, None)
