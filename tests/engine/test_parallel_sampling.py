"""Several completions of a prompt: each is a draw of its own, and the prompt is there, and is computed, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.checks import Canary, assert_clean, assert_idle_and_whole, result
from helpers.pressure import Ask, Watch, byte_model, draw, finish, poison, serve

from minipage import LLM, InvalidArgumentError, SamplingParams
from minipage.outputs import RequestOutput

SEED = 6
TEMPERATURE = 1.1

Folders = Callable[[int], Path]


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens, all of them full of NaN."""
    llm = LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 600, **options})
    poison(llm)
    return llm


def sampled(max_tokens: int, **changes: Any) -> SamplingParams:
    """Seeded sampling that ends at nothing but what is asked for."""
    return SamplingParams(
        **{"temperature": TEMPERATURE, "seed": 1234, "max_tokens": max_tokens, "ignore_eos": True, **changes}
    )


def complete(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """One request."""
    [out] = llm.generate([list(prompt)], params, use_tqdm=False)
    return out


@pytest.fixture(scope="module")
def llm(history: Folders, canary: Callable[[int], Canary]) -> Iterator[LLM]:
    """An engine that is still clean when the module ends."""
    with open_llm(history(SEED), enable_prefix_caching=False) as llm:
        yield llm
        assert_clean(llm, canary(SEED))


# ---- each is a draw of its own -----------------------------------------------------------------------------------------


def test_children_are_drawn_from_seed_and_index(llm: LLM, history: Folders) -> None:
    """Child i is what the random numbers of (seed, i) pick from REF's distributions."""
    model, prompt = ref.Reference(history(SEED)), models.history_prompt(SEED)
    out = complete(llm, prompt, sampled(10, n=5))
    expected = [draw(model, prompt, 10, TEMPERATURE, 1234, child) for child in range(5)]
    assert [output.token_ids for output in out.outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 5


@pytest.mark.parametrize("n", [1, 2, 5, 31])
def test_children_do_not_depend_on_how_many_there_are(llm: LLM, n: int) -> None:
    """The first children of 32 are the children of fewer: child 0 is what n=1 gives."""
    prompt = models.history_prompt(SEED)
    many = complete(llm, prompt, sampled(8, n=32, logprobs=1)).outputs
    few = complete(llm, prompt, sampled(8, n=n, logprobs=1)).outputs
    assert list(map(result, few)) == list(map(result, many[:n]))


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_children_do_not_depend_on_company(history: Folders, llm: LLM, budget: int, caching: bool) -> None:
    """Beside other requests, in any budget, with or without a prefix cache, children are what they are alone."""
    prompt = models.history_prompt(SEED)
    asks = [
        Ask(prompt, sampled(8, n=4, logprobs=2)),
        Ask(prompt[:9], sampled(5, n=3, seed=5)),
        Ask(prompt, sampled(6, n=2, seed=5, presence_penalty=1.0)),
        Ask(prompt[:1], sampled(9)),
    ]
    alone = [serve(llm, [ask])[0] for ask in asks]
    with open_llm(history(SEED), max_num_batched_tokens=budget, enable_prefix_caching=caching, max_num_seqs=7) as other:
        assert serve(other, asks) == alone
        assert serve(other, asks[::-1]) == alone[::-1]


# ---- each ends by itself -----------------------------------------------------------------------------------------------


def test_children_end_on_their_own(llm: LLM, history: Folders) -> None:
    """Where child 2 stops at once and child 0 last, all four come back, each with its own tokens and reason."""
    model, prompt = ref.Reference(history(SEED)), models.history_prompt(SEED)
    stops = list(range(0, 61, 5))

    @cache
    def lengths(seed: int) -> list[int]:
        draws = [draw(model, prompt, 12, TEMPERATURE, seed, child) for child in range(4)]
        return [next((i + 1 for i, token in enumerate(tokens) if token in stops), 12) for tokens in draws]

    seed = next(s for s in range(200) if lengths(s)[2] == 1 and lengths(s)[0] > max(lengths(s)[1:]))
    llm.engine.add_request("four", prompt, sampled(12, n=4, seed=seed, stop_token_ids=stops, logprobs=0))
    watch, free = Watch(), []
    while llm.engine.has_unfinished_requests():
        watch.take(llm.engine.step())
        free.append(llm.stats().num_free_blocks)
    out = watch.last["four"]
    for child, (output, length) in enumerate(zip(out.outputs, lengths(seed), strict=True)):
        assert output.index == child
        expected = draw(model, prompt, length, TEMPERATURE, seed, child)
        assert output.token_ids == expected
        assert output.logprobs is not None and len(output.logprobs) == length
        stopped = expected[-1] in stops
        assert (output.finish_reason, output.stop_reason) == (("stop", expected[-1]) if stopped else ("length", None))
    for step, blocks in enumerate(free, start=1):
        alive = sum(length > step for length in lengths(seed))
        own = -(-(len(prompt) + step - 1) // 4) - 3  # beside three whole blocks of the prompt
        expected_held = 3 + (own * alive if step > 1 else own) if alive else 0
        assert llm.stats().num_blocks - blocks == expected_held, "who has ended gives its blocks back at once"


def test_many_prompts_many_children(tmp_path: Path) -> None:
    """Twelve prompts of three children: results in input order, indices, streams and texts that agree, prompts counted once."""
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(0, 256, n)] for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 21, 29, 30)]
    params = [sampled(4 + i, n=3, seed=i, logprobs=1) for i in range(12)]
    with open_llm(byte_model(tmp_path, 3)) as llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert [out.prompt_token_ids for out in outs] == prompts
        assert llm.stats().prompt_tokens == sum(map(len, prompts))
        assert llm.stats().generation_tokens == sum(3 * each.max_tokens for each in params if each.max_tokens)
        alone = [serve(llm, [Ask(*ask)])[0] for ask in zip(prompts, params, strict=True)]
        assert [tuple(map(result, out.outputs)) for out in outs] == [seen.results for seen in alone]
        together = serve(llm, [Ask(*ask) for ask in zip(prompts, params, strict=True)])
        assert together == alone
        assert all(seen.streams == tuple(each.text for each in seen.results) for seen in together)
        for prompt, each, seen in zip(prompts, params, alone, strict=True):
            joined, ends = ["", "", ""], [0, 0, 0]
            for out in llm.stream(prompt, each):
                for output in out.outputs:
                    joined[output.index] += output.delta_text
                    ends[output.index] += output.finish_reason is not None
            assert tuple(joined) == seen.streams
            assert all(ends)
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborted_children(llm: LLM, steps: int) -> None:
    """An abort ends all children with what each has, and their blocks are free at once."""
    prompt = models.history_prompt(SEED)
    alone = complete(llm, prompt, sampled(8, n=3)).outputs
    llm.engine.add_request("aborted", prompt, sampled(8, n=3))
    for _ in range(steps):
        llm.engine.step()
    out = llm.engine.abort("aborted")
    assert out is not None and out.finished
    assert [output.finish_reason for output in out.outputs] == ["abort"] * 3
    assert [output.token_ids for output in out.outputs] == [output.token_ids[:steps] for output in alone]
    assert_idle_and_whole(llm)


# ---- the prompt is there once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 13, 16])
def test_prompt_is_computed_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Steps compute each token of the prompt once, and each token of each child once but the last."""
    computed = []
    execute = llm.engine.runner.execute
    monkeypatch.setattr(llm.engine.runner, "execute", lambda step: (computed.append(step.num_tokens), execute(step)))
    complete(llm, models.history_prompt(SEED, length), sampled(5, n=4))
    assert computed == [length, 4, 4, 4, 4]


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 12, 13])
def test_only_the_partial_block_is_copied(llm: LLM, length: int, n: int) -> None:
    """Children share all blocks of the prompt; only a partly filled last one is copied, by all but one of them."""
    before = llm.stats().cow_copies
    llm.engine.add_request("n", models.history_prompt(SEED, length), sampled(6, n=n))
    llm.engine.step()
    num_blocks = -(-length // 4)
    assert llm.stats().shared_block_savings == (n - 1) * num_blocks
    assert llm.stats().num_blocks - llm.stats().num_free_blocks == num_blocks
    assert llm.stats().cow_copies == before
    while llm.engine.has_unfinished_requests():
        assert llm.stats().shared_block_savings in ((n - 1) * num_blocks, (n - 1) * (length // 4))
        llm.engine.step()
    assert llm.stats().cow_copies - before == (n - 1 if length % 4 else 0)
    assert_idle_and_whole(llm)


def test_one_token_needs_no_block(llm: LLM) -> None:
    """Children of one token share the prompt to the end: nothing is copied."""
    before = llm.stats().cow_copies
    out = complete(llm, models.history_prompt(SEED), sampled(1, n=8))
    assert [len(output.token_ids) for output in out.outputs] == [1] * 8
    assert llm.stats().cow_copies == before


# ---- how many ----------------------------------------------------------------------------------------------------------


def test_128_children(llm: LLM) -> None:
    """The most that one request may ask for: all come back, in order, and child 0 is what n=1 gives."""
    prompt = models.history_prompt(SEED)
    outputs = complete(llm, prompt, sampled(4, n=128)).outputs
    assert [output.index for output in outputs] == list(range(128))
    assert result(outputs[0]) == result(complete(llm, prompt, sampled(4)).outputs[0])
    assert len({tuple(output.token_ids) for output in outputs}) > 100


def test_as_many_as_seats(history: Folders, llm: LLM) -> None:
    """n == max_num_seqs runs, beside others that wait for their seats; one more is refused."""
    prompt = models.history_prompt(SEED)
    asks = [Ask(prompt, sampled(6, n=4)), Ask(prompt[:4], sampled(3, n=2)), Ask(prompt, sampled(2, n=4, seed=1))]
    alone = [serve(llm, [ask])[0] for ask in asks]
    with open_llm(history(SEED), max_num_seqs=4, max_num_batched_tokens=3) as few:
        assert serve(few, asks) == alone
        with pytest.raises(InvalidArgumentError, match=r"n=5.*max_num_seqs=4"):
            few.engine.add_request("five", prompt, sampled(2, n=5))
        finish(few, Watch())
