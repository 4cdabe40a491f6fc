"""Ways in which schedulers and caches of other engines have been wrong: each a small input, and REF's answer to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.checks import Canary, assert_clean, assert_idle_and_whole, generate_ids, greedy_params, result, run_to_end

from minipage import LLM, SamplingParams

SEED = 5
NEW = 12  #: tokens to generate

Folders = Callable[[int], Path]
Oracle = Callable[[int], ref.Reference]
Canaries = Callable[[int], Canary]


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens."""
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 64, **settings})


# ---- a prompt that is in the cache already -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cached_llm(history: Folders, canary: Canaries) -> Iterator[LLM]:
    """An engine with a prefix cache that is still clean when the module ends."""
    with open_llm(history(SEED)) as llm:
        yield llm
        assert_clean(llm, canary(SEED))


@pytest.mark.parametrize("length", [4, 8, 12, 16, 7, 13])
def test_whole_prompt_cached(cached_llm: LLM, oracle: Oracle, length: int) -> None:
    """A prompt that is cached to its last block is still answered: at least its last token is computed anew."""
    [prompt] = ref.safe_prompts(oracle(SEED), [length], NEW, seed=length)
    expected = ref.greedy(oracle(SEED), prompt, NEW)
    for time in range(3):
        [out] = cached_llm.generate([prompt], greedy_params(NEW), use_tqdm=False)
        assert list(out.outputs[0].token_ids) == expected
        assert out.num_cached_tokens == (0 if time == 0 else (length - 1) // 4 * 4)
    assert generate_ids(cached_llm, [prompt, prompt], greedy_params(NEW)) == [expected, expected]
    [out] = cached_llm.generate([prompt], greedy_params(NEW, n=3), use_tqdm=False)
    assert [list(output.token_ids) for output in out.outputs] == [expected] * 3
    assert generate_ids(cached_llm, [prompt], greedy_params(1)) == [expected[:1]]
    assert_idle_and_whole(cached_llm)


def test_shared_block_is_not_overwritten(cached_llm: LLM, oracle: Oracle) -> None:
    """Who asks a prompt again while another still reads its blocks changes nothing for the other."""
    [prompt] = ref.safe_prompts(oracle(SEED), [16], NEW, seed=160)
    expected = ref.greedy(oracle(SEED), prompt, NEW)
    cached_llm.engine.add_request("first", prompt, greedy_params(NEW))
    for _ in range(3):
        cached_llm.engine.step()
    cached_llm.engine.add_request("again", prompt, greedy_params(NEW))
    cached_llm.engine.add_request("sampled", prompt, SamplingParams(temperature=2.0, seed=1, max_tokens=NEW))
    found = run_to_end(cached_llm)
    assert list(found["first"].outputs[0].token_ids) == expected
    assert list(found["again"].outputs[0].token_ids) == expected
    assert found["again"].num_cached_tokens == 12
    assert_idle_and_whole(cached_llm)


# ---- room that is not there --------------------------------------------------------------------------------------------


def test_hits_are_not_room(history: Folders, oracle: Oracle, canary: Canaries) -> None:
    """Blocks that a request would take from the cache do not count as room for what it needs beside them."""
    model = oracle(SEED)
    prompt_a, prompt_b, prompt_c = ref.safe_prompts(model, [16, 5, 5], NEW, seed=3)
    prompt_c = prompt_a + prompt_c
    with open_llm(history(SEED), num_blocks=6) as llm:
        assert generate_ids(llm, [prompt_a], greedy_params(1)) == [ref.greedy(model, prompt_a, 1)]
        assert llm.stats().num_cached_blocks == 4
        llm.engine.add_request("b", prompt_b, greedy_params(NEW))
        llm.engine.step()
        before = llm.stats()
        assert before.num_free_blocks == 4  # the hits, and nothing else
        llm.engine.add_request("c", prompt_c, greedy_params(3))
        llm.engine.step()
        after = llm.stats()
        assert (after.num_running, after.num_waiting) == (1, 1)
        assert after.num_free_blocks == before.num_free_blocks
        assert after.prefix_cache_hit_tokens == before.prefix_cache_hit_tokens
        llm.check_integrity()
        found = run_to_end(llm)
        assert list(found["b"].outputs[0].token_ids) == ref.greedy(model, prompt_b, NEW)
        assert list(found["c"].outputs[0].token_ids) == ref.greedy(model, prompt_c, 3)
        assert_clean(llm, canary(SEED))


def test_only_request_runs_out_of_blocks(history: Folders, oracle: Oracle, canary: Canaries) -> None:
    """A request that fills the pool alone ends with what fits, and says so; it does not wait for itself."""
    [prompt] = ref.safe_prompts(oracle(SEED), [8], NEW, seed=4)
    with open_llm(history(SEED), num_blocks=2) as llm:
        llm.engine.add_request("only", prompt, greedy_params(4))
        [output] = run_to_end(llm, max_steps=200)["only"].outputs
        assert list(output.token_ids) == ref.greedy(oracle(SEED), prompt, 1)  # the ninth token needs no slot
        assert output.finish_reason == "length"
        with pytest.raises(ValueError, match="9 tokens"):
            llm.engine.add_request("too long", [*prompt, 1], greedy_params(4))
        assert_clean(llm, canary(SEED))


def test_two_requests_take_turns(history: Folders, oracle: Oracle, canary: Canaries) -> None:
    """Two requests that fit one at a time both finish."""
    prompts = ref.safe_prompts(oracle(SEED), [5, 5], NEW, seed=5)
    with open_llm(history(SEED), num_blocks=3) as llm:
        for name, prompt in zip("ab", prompts, strict=True):
            llm.engine.add_request(name, prompt, greedy_params(7))
        found = run_to_end(llm, max_steps=200)
        for name, prompt in zip("ab", prompts, strict=True):
            assert list(found[name].outputs[0].token_ids) == ref.greedy(oracle(SEED), prompt, 7)
        assert_clean(llm, canary(SEED))


# ---- prompts in chunks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chunk_cases(oracle: Oracle) -> list[tuple[list[int], list[int]]]:
    """Prompts of awkward lengths, and what follows them."""
    model = oracle(3)
    return [
        (prompt, ref.greedy(model, prompt, NEW)) for prompt in ref.safe_prompts(model, [1, 4, 5, 17, 31], NEW, seed=6)
    ]


@pytest.mark.parametrize("max_num_seqs", [2, 256])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16])
def test_chunks_emit_nothing_early(
    history: Folders,
    canary: Canaries,
    chunk_cases: list[tuple[list[int], list[int]]],
    budget: int,
    max_num_seqs: int,
) -> None:
    """With any budget, prompts computed together in chunks give REF's tokens, and each finishes in bounded time."""
    with open_llm(history(3), max_num_batched_tokens=budget, max_num_seqs=max_num_seqs) as llm:
        for name, (prompt, _) in enumerate(chunk_cases):
            llm.engine.add_request(str(name), prompt, greedy_params(NEW))
        found = run_to_end(llm, max_steps=sum(len(prompt) + NEW for prompt, _ in chunk_cases))
        assert [found[str(i)].outputs[0].token_ids for i in range(5)] == [expected for _, expected in chunk_cases]
        assert_clean(llm, canary(3))


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16])
def test_first_token_follows_last_chunk(
    history: Folders, chunk_cases: list[tuple[list[int], list[int]]], budget: int
) -> None:
    """The first token comes with the step that computes the prompt's last chunk: no sooner, and no later."""
    with open_llm(history(3), max_num_batched_tokens=budget) as llm:
        for prompt, expected in chunk_cases:
            llm.engine.add_request("x", prompt, greedy_params(1))
            steps = 1
            while not (outs := llm.engine.step()):
                steps += 1
            assert outs[0].outputs[0].token_ids == expected[:1]
            assert steps == -(-len(prompt) // budget)


# ---- slots that hold garbage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    ("dtype", "nan", "inf"), [("float32", np.nan, np.inf), ("bfloat16", 0x7FC0, 0x7F80), ("int8", -1, 127)]
)
def test_garbage_in_unused_slots(history: Folders, dtype: str, nan: float, inf: float, block_size: int) -> None:
    """What was in a slot before its token came changes not a bit, be it NaN, infinity, or in int8 a scale of 3e38."""
    prompts = [models.history_prompt(SEED, length) for length in (1, 3, 4, 5, 17)]
    found = []
    for fill in (0, nan, inf):
        settings = {"kv_cache_dtype": dtype, "block_size": block_size, "enable_prefix_caching": False}
        with open_llm(history(SEED), **settings) as llm:
            llm.engine.runner.kv.key[...] = fill
            llm.engine.runner.kv.value[...] = fill
            outs = llm.generate(prompts, greedy_params(NEW, logprobs=3), use_tqdm=False)
            found.append([result(out.outputs[0]) for out in outs])
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_poisoned_blocks_are_reused(tmp_path: Path, canary: Canaries) -> None:
    """A request whose logits are NaN ends with an error of its own; its mates and who gets its blocks notice nothing."""
    poison = 1  # neither in the prompts nor in what the canary says
    config = models.HISTORY_CONFIG
    tensors = models.history_tensors(SEED)
    tensors["model.embed_tokens.weight"][poison] = np.nan
    folder = models.write_folder(tmp_path / "poison", config, tensors)
    never = greedy_params(NEW, logprobs=3, logit_bias={poison: float("-inf")})
    prompts = [[t for t in models.history_prompt(SEED, n) if t != poison] for n in (1, 3, 4, 5, 17)]
    with open_llm(folder, num_blocks=12) as llm:
        alone = [result(llm.generate(prompt, never, use_tqdm=False)[0].outputs[0]) for prompt in prompts]
        for prompt in prompts:
            llm.engine.add_request("ill", [*prompt, poison, *prompt][:20], greedy_params(NEW, n=1 + len(prompt) % 2))
            llm.engine.add_request("well", prompt, never)
            found = run_to_end(llm)
            assert len(found["ill"].outputs) == 1 + len(prompt) % 2
            for output in found["ill"].outputs:
                assert (output.finish_reason, output.token_ids) == ("abort", [])
                assert "nan" in str(output.stop_reason).lower()
            assert result(found["well"].outputs[0]) == alone[prompts.index(prompt)]
        assert [result(llm.generate(prompt, never, use_tqdm=False)[0].outputs[0]) for prompt in prompts] == alone
        assert_clean(llm, canary(SEED))
