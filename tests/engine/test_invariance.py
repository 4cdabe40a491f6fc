"""Numbers do not depend on company: a request's tokens and logprobs are the same bits alone and in any crowd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import models
from helpers.checks import (
    TIGHT,
    TIGHT_MAX_TOKENS,
    TIGHT_PROMPT_LENGTH,
    Result,
    assert_idle_and_whole,
    result,
    run_to_end,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipage import LLM, SamplingParams

#: Storages of weights and of K and V, as keywords of LLM.
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 KV": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
CROWD = 33
ROOMY: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 600, "max_num_batched_tokens": 2048}

Solo = Callable[[int, str, int], Result]


class Ask(NamedTuple):
    """A request of the tests below."""

    prompt: list[int]
    params: SamplingParams


@cache
def crowd(seed: int) -> tuple[Ask, ...]:
    """33 requests, prompts of 1 to 40 tokens, some sharing a beginning; every other one samples with a seed of its own."""
    rng = np.random.default_rng(seed)
    shared = [int(i) for i in rng.integers(0, models.VOCAB_SIZE, 16)]
    asks = []
    for i in range(CROWD):
        own = [int(t) for t in rng.integers(0, models.VOCAB_SIZE, rng.integers(1, 25))]
        temperature = 0.0 if i % 2 else 1.2
        params = SamplingParams(temperature=temperature, seed=1000 + i, max_tokens=int(rng.integers(1, 13)), logprobs=2)
        asks.append(Ask(shared + own if i % 3 == 0 else own, params))
    return tuple(asks)


@cache
def squeeze(seed: int) -> tuple[Ask, ...]:
    """The four requests of TIGHT."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, models.VOCAB_SIZE, (4, TIGHT_PROMPT_LENGTH))
    return tuple(
        Ask(
            [int(t) for t in prompt],
            SamplingParams(temperature=0.0 if i % 2 else 1.2, seed=i, max_tokens=TIGHT_MAX_TOKENS, logprobs=2),
        )
        for i, prompt in enumerate(prompts)
    )


def ask_all(llm: LLM, asks: Sequence[Ask]) -> list[Result]:
    """The results of requests that are served together."""
    outs = llm.generate([ask.prompt for ask in asks], [ask.params for ask in asks], use_tqdm=False)
    return [result(out.outputs[0]) for out in outs]


@pytest.fixture(scope="module")
def solo(history: Callable[[int], Path]) -> Iterator[Solo]:
    """What request i of crowd(seed), or of squeeze(seed) from -4 on, gives alone on one thread, without a cache."""
    llms: dict[tuple[int, str], LLM] = {}

    @cache
    def run(seed: int, kind: str, i: int) -> Result:
        if (seed, kind) not in llms:
            settings = ROOMY | KINDS[kind]
            llms[seed, kind] = LLM(str(history(seed)), num_threads=1, enable_prefix_caching=False, **settings)
        ask = crowd(seed)[i] if i >= 0 else squeeze(seed)[i]
        return ask_all(llms[seed, kind], [ask])[0]

    yield run
    for llm in llms.values():
        llm.close()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "budget"),
    [*itertools.product(("float32", "bfloat16"), (1, 5, 64, 2048)), ("int8 KV", 5), ("int8 KV", 2048)],
)
def test_batches_and_budgets(
    history: Callable[[int], Path], solo: Solo, kind: str, budget: int, num_threads: int
) -> None:
    """Alone and in batches of 2, 8 and 33, with any token budget and number of threads, prefix cache on or off."""
    seed = models.SAFE_SEEDS[budget % 3]
    settings = ROOMY | KINDS[kind] | {"num_threads": num_threads, "max_num_batched_tokens": budget}
    for caching in (False, True):
        with LLM(str(history(seed)), enable_prefix_caching=caching, **settings) as llm:
            start = 0
            for size in (1, 2, 8, 33):
                members = [i % CROWD for i in range(start, start + size)]
                found = ask_all(llm, [crowd(seed)[i] for i in members])
                assert found == [solo(seed, kind, i) for i in members]
                start += size
            assert (llm.stats().prefix_cache_hit_tokens > 0) == caching
            assert_idle_and_whole(llm)


@pytest.mark.parametrize("seed", models.SAFE_SEEDS)
@pytest.mark.parametrize("mode", ["recompute", "recompute, cached", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted(history: Callable[[int], Path], solo: Solo, kind: str, mode: str, seed: int) -> None:
    """Preempted and computed again, or swapped out and in: no trace in tokens or logprobs."""
    swap = {"preemption_mode": "swap", "swap_space": "1MiB"} if mode == "swap" else {}
    with LLM(
        str(history(seed)),
        device="cpu",
        num_threads=1 + seed % 2,
        enable_prefix_caching="cached" in mode,
        **KINDS[kind],
        **TIGHT,
        **swap,
    ) as llm:
        assert ask_all(llm, squeeze(seed)) == [solo(seed, kind, i) for i in range(-4, 0)]
        assert llm.stats().preemptions > 0
        assert_idle_and_whole(llm)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(st.tuples(st.integers(0, CROWD - 1), st.integers(0, 12)), min_size=1, max_size=12),
    budget=st.integers(1, 40),
    num_blocks=st.integers(13, 40),
    max_num_seqs=st.integers(1, 8),
    caching=st.booleans(),
    kind=st.sampled_from(["float32", "int8 KV"]),
)
def test_any_mix(
    history: Callable[[int], Path],
    solo: Solo,
    arrivals: list[tuple[int, int]],
    budget: int,
    num_blocks: int,
    max_num_seqs: int,
    caching: bool,
    kind: str,
) -> None:
    """Whoever comes when, whatever the budget, the pool and the number of seats: each gets what it gets alone."""
    seed = 3
    llm = LLM(
        str(history(seed)),
        device="cpu",
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        **KINDS[kind],
    )
    with llm:
        found = {}
        for step in range(13):
            for name, (i, when) in enumerate(arrivals):
                if when == step:
                    llm.engine.add_request(str(name), crowd(seed)[i].prompt, crowd(seed)[i].params)
            found |= {out.request_id: out for out in llm.engine.step()}
        found |= run_to_end(llm)
        for name, (i, _) in enumerate(arrivals):
            assert result(found[str(name)].outputs[0]) == solo(seed, kind, i)
        assert_idle_and_whole(llm)
