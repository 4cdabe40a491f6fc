"""A long day: a thousand requests of all lengths in a pool that is too small, a third of them aborted at some moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from helpers import models
from helpers.checks import Canary, Result, assert_clean, result

from minipage import LLM, SamplingParams

NUM_REQUESTS = 1000
NUM_PROMPTS = 48  #: distinct ones, so that solo runs and cached prefixes are met again
LONGEST_PROMPT, LONGEST_OUTPUT = 60, 30
NUM_BLOCKS = 40  #: of 4 tokens; the longest request needs 23


class Ask(NamedTuple):
    """One request of the day; ``abort_after`` is a number of steps, or None."""

    prompt: int
    num_tokens: int
    abort_after: int | None


def lengths(rng: np.random.Generator, mean: float, longest: int, count: int) -> list[int]:
    """Lengths as traces of chat services have them: log-normal, many short and a few long, scaled down to the model."""
    return [int(n) for n in np.clip(rng.lognormal(np.log(mean), 0.9, count), 1, longest)]


def make_day(rng: np.random.Generator) -> tuple[list[list[int]], list[Ask]]:
    """The prompts, and the requests in order of arrival."""
    prompts = [
        [int(t) for t in rng.integers(0, models.VOCAB_SIZE, n)] for n in lengths(rng, 10, LONGEST_PROMPT, NUM_PROMPTS)
    ]
    asks = [
        Ask(int(rng.integers(NUM_PROMPTS)), n, int(rng.integers(0, 30)) if rng.random() < 1 / 3 else None)
        for n in lengths(rng, 7, LONGEST_OUTPUT, NUM_REQUESTS)
    ]
    return prompts, asks


def params(prompt: int, num_tokens: int) -> SamplingParams:
    """Greedy for every other prompt, else seeded by the prompt: a shorter request is then the beginning of a longer one."""
    temperature = 0.0 if prompt % 2 else 1.1
    return SamplingParams(temperature=temperature, seed=prompt, max_tokens=num_tokens, logprobs=1)


def begins(longer: Result, shorter: Result) -> bool:
    """Whether a result's tokens and logprobs are the beginning of another's."""
    n = len(shorter.token_ids)
    return shorter.token_ids == longer.token_ids[:n] and shorter.logprobs == longer.logprobs[:n]


def test_a_long_day(history: Callable[[int], Path], canary: Callable[[int], Canary]) -> None:
    """Every finished request equals its solo run, aborted ones its beginning, and the pool ends whole."""
    rng = np.random.default_rng(2024)
    prompts, asks = make_day(rng)
    folder = str(history(3))
    with LLM(folder, device="cpu", dtype="float32", block_size=4, num_blocks=30) as llm:
        alone = [
            result(llm.generate(prompt, params(i, LONGEST_OUTPUT), use_tqdm=False)[0].outputs[0])
            for i, prompt in enumerate(prompts)
        ]
    with LLM(
        folder, device="cpu", dtype="float32", block_size=4, num_blocks=NUM_BLOCKS, max_num_batched_tokens=48
    ) as llm:
        arrivals = iter(enumerate(asks))
        to_abort: dict[int, list[str]] = {}
        served = aborted = step = 0
        while served + aborted < NUM_REQUESTS:
            for number, ask in arrivals:
                llm.engine.add_request(str(number), prompts[ask.prompt], params(ask.prompt, ask.num_tokens))
                if ask.abort_after is not None:
                    to_abort.setdefault(step + ask.abort_after, []).append(str(number))
                if rng.random() < 0.5:  # two arrivals a step on average
                    break
            for name in to_abort.pop(step, ()):
                aborted += llm.engine.abort(name) is not None
            for out in llm.engine.step():
                ask = asks[int(out.request_id)]
                assert begins(alone[ask.prompt], result(out.outputs[0]))
                if out.finished:
                    assert len(out.outputs[0].token_ids) == ask.num_tokens
                    served += 1
            step += 1
            assert step < 20_000
            if step % 50 == 0:
                llm.check_integrity()
        stats = llm.stats()
        assert stats.preemptions > 0
        assert stats.prefix_cache_hit_tokens > 0
        assert aborted > NUM_REQUESTS / 5
        assert_clean(llm, canary(3))
