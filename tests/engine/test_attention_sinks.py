"""Attention sinks (StreamingLLM): a rolling cache that keeps the first tokens, and goes on past the trained length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.checks import assert_idle_and_whole, greedy_params, logprob_matrix, result

from minipage import LLM, SamplingParams
from minipage.engine.cache_setup import group_layers
from minipage.errors import InvalidArgumentError
from minipage.outputs import RequestOutput

SEED = 5
VOCAB = models.VOCAB_SIZE
NEW = 12
WINDOW, SINKS = 8, 3
PROMPT = models.history_prompt(SEED, 50)
SINKING: dict[str, Any] = {"sliding_window": WINDOW, "attention_sinks": SINKS}

Folders = Callable[[int], Path]
Oracle = Callable[[int], ref.Reference]


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens."""
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 64, **settings})


def ask(llm: LLM, prompt: list[int] = PROMPT, **changes: Any) -> RequestOutput:
    """A prompt with all its logprobs, and those of what is generated."""
    [out] = llm.generate([prompt], greedy_params(NEW, logprobs=VOCAB, prompt_logprobs=VOCAB, **changes), use_tqdm=False)
    return out


def assert_equals_oracle(model: ref.Reference, out: RequestOutput, window: int, sinks: int) -> None:
    """All logprobs, those of the prompt and of each output, are what the oracle says about the same tokens."""
    assert out.prompt_logprobs is not None
    for output in out.outputs:
        assert output.logprobs is not None
        expected = ref.log_softmax(model.logits([*out.prompt_token_ids, *output.token_ids][:-1], window, sinks))
        found = logprob_matrix([*out.prompt_logprobs[1:], *output.logprobs], VOCAB)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(("window", "sinks"), [(8, 3), (1, 1), (5, 4), (16, 9), (40, 30), (3, 0)])
def test_streaming_is_what_the_oracle_says(
    history: Folders, oracle: Oracle, device: str, window: int, sinks: int
) -> None:
    """Prompts and generation with sinks and a window give the logprobs of a cache that is rotated anew for each token."""
    with open_llm(history(SEED), device=device, sliding_window=window, attention_sinks=sinks) as llm:
        assert_equals_oracle(oracle(SEED), ask(llm), window, sinks)
        assert_idle_and_whole(llm)


def test_the_model_may_have_the_windows(tmp_path: Path) -> None:
    """Sinks go with windows of the model's own."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6}
    folder = models.history_model(tmp_path, SEED, **mistral)
    with open_llm(folder, attention_sinks=2) as llm:
        assert_equals_oracle(ref.Reference(folder), ask(llm), 6, 2)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_chunks_and_hits_change_no_bit(history: Folders, block_size: int) -> None:
    """Whatever the budget of a step, with and without a prefix cache, cold and warm, the bits are the same."""
    results = []
    for budget in (1, 3, 5, 64):
        for caching in (False, True):
            settings = {"max_num_batched_tokens": budget, "enable_prefix_caching": caching, "block_size": block_size}
            with open_llm(history(SEED), **settings, **SINKING) as llm:
                for time in range(2):
                    # Scoring a prompt computes all of it, so hits need a request that does not.
                    [out] = llm.generate([PROMPT], greedy_params(NEW, logprobs=VOCAB), use_tqdm=False)
                    assert (out.num_cached_tokens > 0) == (caching and time == 1)
                    results.append(result(out.outputs[0]))
                assert_idle_and_whole(llm)
    assert all(other == results[0] for other in results)


def test_a_longer_prompt_hits_across_what_was_released(history: Folders) -> None:
    """A prompt that goes on where a conversation ended is found in the cache: sinks and the last window are enough."""
    with open_llm(history(SEED), **SINKING) as llm:
        first = ask(llm)
        longer = [*PROMPT, *first.outputs[0].token_ids, 7, 8]
        [warm] = llm.generate([longer], greedy_params(NEW, logprobs=VOCAB), use_tqdm=False)
        assert warm.num_cached_tokens == 60
    with open_llm(history(SEED), **SINKING) as llm:
        [cold] = llm.generate([longer], greedy_params(NEW, logprobs=VOCAB), use_tqdm=False)
    assert result(warm.outputs[0]) == result(cold.outputs[0])


@pytest.mark.parametrize("sinks", [1, 4, 5])
@pytest.mark.parametrize("budget", [1, 64])
def test_blocks_stay_bounded(history: Folders, sinks: int, budget: int) -> None:
    """However long a sequence gets, it holds the sinks' blocks and ceil(W/B)+1 others; a chunk of W tokens fits beside them."""
    settings = {"attention_sinks": sinks, "sliding_window": WINDOW, "max_num_batched_tokens": budget}
    for_sinks = -(-sinks // 4)
    with open_llm(history(SEED), enable_prefix_caching=False, num_blocks=for_sinks + 5, **settings) as llm:
        llm.engine.add_request("long", PROMPT, greedy_params(150))
        held, outs = [], []
        while llm.engine.has_unfinished_requests():
            outs += llm.engine.step()
            held.append(llm.stats().num_blocks - llm.stats().num_free_blocks)
        assert len(outs[-1].outputs[0].token_ids) == 150
        assert max(held) == for_sinks + WINDOW // 4 + 1
        assert_idle_and_whole(llm)


def test_forks_go_on_alone(history: Folders, oracle: Oracle) -> None:
    """Three continuations of one prompt share its blocks, and each is what the oracle says."""
    with open_llm(history(SEED), **SINKING) as llm:
        out = ask(llm, n=3, temperature=1.5, seed=1)
        assert len({tuple(output.token_ids) for output in out.outputs}) == 3
        assert_equals_oracle(oracle(SEED), out, WINDOW, SINKS)
        assert llm.stats().cow_copies > 0
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("preemption", [{}, {"preemption_mode": "swap", "swap_space": "1MiB"}])
def test_preemption_changes_no_bit(history: Folders, preemption: dict[str, Any]) -> None:
    """In a pool that is too small for all, recomputed or swapped, requests end as in a roomy one."""
    prompts = [models.history_prompt(seed, 9) for seed in range(4)]
    params = [SamplingParams(seed=i, max_tokens=40, logprobs=2, ignore_eos=True) for i in range(4)]
    results = []
    for num_blocks in (64, 7):
        with open_llm(history(SEED), num_blocks=num_blocks, **preemption, **SINKING) as llm:
            outs = llm.generate(prompts, params, use_tqdm=False)
            results.append([result(out.outputs[0]) for out in outs])
            assert (llm.stats().preemptions > 0) == (num_blocks == 7)
            assert_idle_and_whole(llm)
    assert results[0] == results[1]


# ---- past the trained length -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda rope: rope.get("rope_type", "default"),
)
def test_text_may_be_longer_than_trained(tmp_path: Path, rope: dict[str, Any], sinks: int) -> None:
    """With a window in every layer, a sequence may be longer than the model's positions, and is what the oracle says."""
    folder = models.history_model(tmp_path, SEED, max_position_embeddings=32, rope_scaling=rope or None)
    with open_llm(folder, sliding_window=8, attention_sinks=sinks, max_model_len=300) as llm:
        out = ask(llm, models.history_prompt(SEED, 280))
        assert len(out.outputs[0].token_ids) == NEW
        assert_equals_oracle(ref.Reference(folder), out, 8, sinks)


def test_how_long_text_may_be(tmp_path: Path) -> None:
    """Longer than trained is refused where distances could get longer, and it is never the default."""
    folder = models.history_model(tmp_path, SEED, max_position_embeddings=32)
    with open_llm(folder, sliding_window=8, attention_sinks=4) as llm:
        assert llm.info.max_model_len == 32
    for settings in ({}, {"sliding_window": 33}, {"sliding_window": 29, "attention_sinks": 4}):
        with pytest.raises(InvalidArgumentError, match=r"max_model_len=33 .* at most 32.*sliding_window"):
            open_llm(folder, max_model_len=33, **settings)
    with open_llm(folder, sliding_window=28, attention_sinks=4, max_model_len=33) as llm:
        assert llm.info.max_model_len == 33
    with pytest.raises(InvalidArgumentError, match=r"max_model_len=2000000 .* at most 1048576"):
        open_llm(folder, sliding_window=8, max_model_len=2_000_000)


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [-1, 1.5, True, "4", None])
def test_bad_sinks(history: Folders, sinks: Any) -> None:
    """The number of sinks is an integer of at least 0."""
    with pytest.raises(InvalidArgumentError, match="attention_sinks="):
        open_llm(history(SEED), sliding_window=8, attention_sinks=sinks)


def test_sinks_need_windows(tmp_path: Path, history: Folders) -> None:
    """Without a window in every layer, sinks are refused, with what to do."""
    with pytest.raises(InvalidArgumentError, match=r"attention_sinks=4 .*sliding_window"):
        open_llm(history(SEED), attention_sinks=4)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    mixed = models.history_model(tmp_path, SEED, **mistral, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(InvalidArgumentError, match=r"attention_sinks=4 .*sliding_window"):
        open_llm(mixed, attention_sinks=4)


def test_dynamic_rope_within_its_original_length(tmp_path: Path) -> None:
    """Positions in the cache are those that a dynamic rope looks at: beyond its original length, they are refused."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    folder = models.history_model(tmp_path, SEED, max_position_embeddings=32, rope_scaling=rope)
    with pytest.raises(InvalidArgumentError, match=r"attention_sinks=4 and a window of 29 .* at most 32 together"):
        open_llm(folder, sliding_window=29, attention_sinks=4)
    with open_llm(folder, sliding_window=28, attention_sinks=4) as llm:
        assert_equals_oracle(ref.Reference(folder), ask(llm), 28, 4)


def test_groups_keep_their_sinks() -> None:
    """Groups of layers with different windows keep the same sinks."""
    groups, layer_groups = group_layers([8, 16, 8, 16], 4)
    assert [tuple(group) for group in groups] == [(8, 4), (16, 4)]
    assert layer_groups == [0, 1, 0, 1]
