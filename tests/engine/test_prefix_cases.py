"""Who finds cached prefixes: children, beams, preempted and resumed requests, conversations; with windows and without.

Whatever is found, evicted or refused, the answer is that of an engine that computes everything, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models
from helpers.checks import (
    TIGHT_PROMPT_LENGTH,
    Result,
    assert_idle_and_whole,
    greedy_params,
    result,
    run_to_end,
)
from helpers.talker import talker

from minipage import LLM, BeamSearchParams, SamplingParams

SEED = 5
NEW = 10
WINDOW = 8
PROMPT = models.history_prompt(SEED, 14)
KINDS = ("no window", "window", "both")  #: of layers

Folders = Callable[[str], Path]
Cold = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A history model whose layers have no window, a window of 8, or both: one without and two with."""
    windows = {"window": {"max_window_layers": 0}, "both": {"max_window_layers": 1, "num_hidden_layers": 3}}

    def make(kind: str) -> Path:
        config = {"use_sliding_window": True, "sliding_window": WINDOW, **windows[kind]} if kind in windows else {}
        return models.history_model(tmp_path_factory.mktemp("layers"), SEED, **config)

    return cache(make)


def open_llm(path: Path, kind: str = "no window", num_blocks: int = 64, **settings: Any) -> LLM:
    """An engine with blocks of four tokens, and room for ``num_blocks`` of them in each group of layers."""
    groups = 3 if kind == "both" else 1
    return LLM(
        str(path),
        **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": num_blocks * groups, **settings},
    )


@pytest.fixture(scope="module")
def cold(folder: Folders) -> Iterator[Cold]:
    """What an engine without a cache says to a prompt."""
    llms: dict[str, LLM] = {}

    def ask(kind: str, prompt: list[int], num_tokens: int) -> Result:
        if kind not in llms:
            llms[kind] = open_llm(folder(kind), kind, enable_prefix_caching=False)
        [out] = llms[kind].generate([prompt], greedy_params(num_tokens, logprobs=1), use_tqdm=False)
        return result(out.outputs[0])

    yield ask
    for llm in llms.values():
        llm.close()


def ask(llm: LLM, prompt: list[int], num_tokens: int = NEW) -> tuple[Result, int]:
    """A greedy answer, and how many tokens of the prompt were cached."""
    [out] = llm.generate([prompt], greedy_params(num_tokens, logprobs=1), use_tqdm=False)
    return result(out.outputs[0]), out.num_cached_tokens


def whole_blocks(num_tokens: int) -> int:
    """The tokens in full blocks."""
    return num_tokens // 4 * 4


# ---- who hits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_children(folder: Folders, cold: Cold, kind: str) -> None:
    """n children begin from a cached prompt, and what each of them has said is found by who goes on from there."""
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=NEW, logprobs=1, ignore_eos=True)
    with open_llm(folder(kind), kind) as llm:
        [first] = llm.generate([PROMPT], params, use_tqdm=False)
        [again] = llm.generate([PROMPT], params, use_tqdm=False)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 12)
        assert [result(output) for output in again.outputs] == [result(output) for output in first.outputs]
        assert len({tuple(output.token_ids) for output in first.outputs}) == 3
        for output in first.outputs:
            prompt = [*PROMPT, *output.token_ids, 1]
            assert ask(llm, prompt) == (cold(kind, prompt, NEW), whole_blocks(14 + NEW - 1))
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_beams(folder: Folders, cold: Cold, kind: str) -> None:
    """A beam search begins from a cached prompt, and all its best beams are found by who goes on from them."""
    params = BeamSearchParams(beam_width=3, max_tokens=NEW, ignore_eos=True, n=3)
    with open_llm(folder(kind), kind) as llm:
        [first] = llm.beam_search([PROMPT], params, use_tqdm=False)
        [again] = llm.beam_search([PROMPT], params, use_tqdm=False)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 12)
        assert [result(output) for output in again.outputs] == [result(output) for output in first.outputs]
        for output in first.outputs:
            prompt = [*PROMPT, *output.token_ids, 1]
            assert ask(llm, prompt) == (cold(kind, prompt, NEW), whole_blocks(14 + NEW - 1))
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("kind", "n", "num_tokens", "pools"),
    [
        ("no window", 1, 24, (10, 11, 12)),
        ("no window", 3, 8, (10, 11, 12)),
        ("window", 3, 8, (10, 12, 13)),
        ("both", 1, 24, (9, 12, 13)),
        ("both", 3, 8, (11, 13, 14)),
    ],
)
def test_preempted_and_resumed(
    folder: Folders, cold: Cold, kind: str, n: int, num_tokens: int, pools: tuple[int, ...], swap: bool
) -> None:
    """Who is computed again after a preemption finds blocks of its own; however it came back, it is found by who goes on."""
    prompts = np.random.default_rng(8).integers(0, models.VOCAB_SIZE, (4, TIGHT_PROMPT_LENGTH)).tolist()
    settings = {"preemption_mode": "swap", "swap_space": "1MiB"} if swap else {}
    num_hits = num_swapped = 0
    for num_blocks in pools:
        with open_llm(folder(kind), kind, num_blocks, **settings) as llm:
            outs = llm.generate(prompts, greedy_params(num_tokens, n=n, logprobs=1), use_tqdm=False)
            for out, prompt in zip(outs, prompts, strict=True):
                assert [result(output) for output in out.outputs] == [cold(kind, prompt, num_tokens)] * n
            assert [out.num_cached_tokens for out in outs] == [0] * 4  # no two prompts begin alike
            stats = llm.stats()
            assert stats.preemptions > 0
            num_hits += stats.prefix_cache_hit_tokens
            num_swapped += stats.swapped_in_blocks
            last = [*prompts[3], *outs[3].outputs[0].token_ids, 1]
            assert ask(llm, last, 2) == (cold(kind, last, 2), whole_blocks(TIGHT_PROMPT_LENGTH + num_tokens - 1))
            assert_idle_and_whole(llm)
    assert (num_hits > 0) == (not swap)
    assert (num_swapped > 0) == swap


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_of_tokens(folder: Folders, cold: Cold, kind: str) -> None:
    """Each turn finds all full blocks of the turns before, answers included."""
    history = list(PROMPT)
    with open_llm(folder(kind), kind) as llm:
        num_computed = 0
        for turn in range(4):
            answer, num_cached = ask(llm, history)
            assert answer == cold(kind, history, NEW)
            assert num_cached == whole_blocks(num_computed)
            num_computed = len(history) + NEW - 1  # the last token of an answer is computed when something follows
            history += [*answer.token_ids, 1 + turn, 7]
        assert_idle_and_whole(llm)


def test_a_chat(tmp_path: Path) -> None:
    """Each question finds the conversation before it, its system prompt shared by all conversations of the same salt."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    system = {"role": "system", "content": "You know the capitals of all lands. "}
    with open_llm(talker(tmp_path, template), num_blocks=256) as llm:
        for country in ("France", "Gaul"):
            messages = [system, {"role": "user", "content": f"{country}>"}]
            known = len(system["content"]) if country == "Gaul" else 0
            for turn in range(3):
                [out] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
                assert out.outputs[0].text == "Paris."
                assert out.num_cached_tokens == whole_blocks(known)
                known = len(out.prompt_token_ids) + len("Paris.")
                messages += [{"role": "assistant", "content": "Paris."}, {"role": "user", "content": f" {turn}>"}]
        params = SamplingParams(temperature=0, max_tokens=1)
        messages.pop()
        for salt, is_known in (("mine", False), ("mine", True), ("other", False), (None, True)):
            [out] = llm.chat(messages, params, use_tqdm=False, cache_salt=salt)
            *_, streamed = llm.stream_chat(messages, params, cache_salt=None if salt is None else f"{salt} stream")
            assert (out.num_cached_tokens > 0, streamed.num_cached_tokens > 0) == (is_known, is_known)
        assert_idle_and_whole(llm)


# ---- what is evicted -----------------------------------------------------------------------------------------------------


def test_tails_are_evicted_first(folder: Folders, cold: Cold) -> None:
    """After one eviction all of a chain but its end is still found; blocks that hold something else are never found."""
    rng = np.random.default_rng(29)
    prompt, other = (rng.integers(0, models.VOCAB_SIZE, n).tolist() for n in (13, 24))
    with open_llm(folder("no window"), num_blocks=8) as llm:
        ask(llm, prompt[:12], 1)
        assert llm.stats().num_cached_blocks == 3
        ask(llm, other, 1)  # takes the five that hold nothing, and the end of the chain
        assert ask(llm, prompt) == (cold("no window", prompt, NEW), 8)


@pytest.mark.parametrize("num_blocks", [8, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_reused_blocks_are_forgotten(folder: Folders, cold: Cold, kind: str, num_blocks: int) -> None:
    """Thirty strangers come and go in a small pool; who asks again after each gets the right answer, cached or not."""
    rng = np.random.default_rng(30)
    prompt = rng.integers(0, models.VOCAB_SIZE, 13).tolist()
    expected = cold(kind, prompt, 6)
    hits = set()
    with open_llm(folder(kind), kind, num_blocks) as llm:
        for _ in range(30):
            stranger = rng.integers(0, models.VOCAB_SIZE, rng.integers(1, 27)).tolist()
            assert ask(llm, stranger, 1)[0] == cold(kind, stranger, 1)
            found, num_cached = ask(llm, prompt, 6)
            assert found == expected
            hits.add(num_cached)
            assert_idle_and_whole(llm)
    assert hits >= {0, 12}


def test_window_keeps_what_the_next_token_sees(folder: Folders, cold: Cold) -> None:
    """In a rolling cache what the window has left behind goes first: what goes on from the end is still a hit."""
    rng = np.random.default_rng(31)
    prompt, other = (rng.integers(0, models.VOCAB_SIZE, n).tolist() for n in (16, 20))
    with open_llm(folder("window"), num_blocks=8) as llm:
        ask(llm, prompt, 1)
        assert llm.stats().num_cached_blocks == 4
        ask(llm, other, 1)
        assert llm.stats().num_cached_blocks == 8
        longer = [*prompt, 1, 2]
        assert ask(llm, longer) == (cold("window", longer, NEW), 16)
        assert ask(llm, prompt[:9]) == (cold("window", prompt[:9], NEW), 0)


# ---- hits are not room -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_hits_are_not_room(folder: Folders, cold: Cold, kind: str) -> None:
    """Evictable hits are not counted as room for what a request needs beside them: it waits, and nothing has changed."""
    rng = np.random.default_rng(3)
    first, running, more = (rng.integers(0, models.VOCAB_SIZE, n).tolist() for n in (16, 5, 5))
    waiting = first + more
    with open_llm(folder(kind), kind, num_blocks=6) as llm:
        ask(llm, first, 1)
        llm.engine.add_request("running", running, greedy_params(NEW, logprobs=1))
        llm.engine.step()
        before = llm.stats()
        cached = llm.engine._scheduler.blocks.allocator.cached_blocks()
        llm.engine.add_request("waiting", waiting, greedy_params(3, logprobs=1))
        llm.engine.step()
        after = llm.stats()
        assert (after.num_running, after.num_waiting) == (1, 1)
        assert after.num_free_blocks == before.num_free_blocks
        assert after.prefix_cache_hit_tokens == before.prefix_cache_hit_tokens
        assert set(cached) <= set(llm.engine._scheduler.blocks.allocator.cached_blocks())
        llm.check_integrity()
        found = run_to_end(llm)
        assert result(found["running"].outputs[0]) == cold(kind, running, NEW)
        assert result(found["waiting"].outputs[0]) == cold(kind, waiting, 3)
        assert_idle_and_whole(llm)
