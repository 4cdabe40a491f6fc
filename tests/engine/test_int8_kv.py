"""K and V in int8: close to float32, in a third of its bytes or less, and as indifferent to company as any other storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models
from helpers.checks import assert_idle_and_whole, greedy_params, logprob_matrix, result

from minipage import LLM, InvalidArgumentError, SamplingParams
from minipage.inspection import inspect_model

SEED = 10
VOCAB = models.VOCAB_SIZE
PROMPTS = [models.history_prompt(seed, 50 - seed) for seed in range(4)]

Folders = Callable[[int], Path]


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine with float32 weights, K and V in int8 and blocks of four tokens."""
    defaults = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "int8", "block_size": 4, "num_blocks": 120}
    return LLM(str(folder), **{**defaults, **settings})


def distributions(folder: Path, **settings: Any) -> np.ndarray:
    """All log probabilities of the tokens of the prompts, [tokens, V]."""
    with open_llm(folder, **settings) as llm:
        outs = llm.generate(PROMPTS, greedy_params(1, prompt_logprobs=VOCAB), use_tqdm=False)
        assert_idle_and_whole(llm)
    return np.concatenate([logprob_matrix((out.prompt_logprobs or [])[1:], VOCAB) for out in outs])


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 8}, {"sliding_window": 8, "attention_sinks": 3}], ids=str)
def test_close_to_float32(history: Folders, settings: dict[str, Any]) -> None:
    """int8 is off by no more than three times what bfloat16 is off, and by something: 2^-8 of the largest, not of each."""
    exact = distributions(history(SEED), kv_cache_dtype="float32", **settings)
    errors = {
        kind: np.abs(distributions(history(SEED), kv_cache_dtype=kind, **settings) - exact).mean()
        for kind in ("bfloat16", "int8")
    }
    assert 0.001 < errors["int8"] < 3 * errors["bfloat16"]


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 8, "attention_sinks": 3}], ids=str)
def test_what_the_reference_says(history: Folders, settings: dict[str, Any]) -> None:
    """Compiled kernels and plain NumPy agree, but after a number so near the middle of two codes that they round it apart."""
    difference = distributions(history(SEED), **settings) - distributions(history(SEED), device="reference", **settings)
    agrees = np.abs(difference).max(axis=-1) < 1e-4
    assert agrees.mean() > 0.95
    assert np.abs(difference).max() < 0.02


@pytest.mark.parametrize(
    ("window", "tight"), [({"sliding_window": 8}, 5), ({"sliding_window": 7, "attention_sinks": 3}, 7)], ids=str
)
def test_windows_change_no_bit(history: Folders, window: dict[str, Any], tight: int) -> None:
    """With windows and sinks, in any chunks, batch and number of threads, cold, cached or preempted: the same bits."""
    prompts = [models.history_prompt(seed, 5 + seed) for seed in range(4)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20, logprobs=2, ignore_eos=True) for i in range(4)]
    with open_llm(history(SEED), num_threads=1, enable_prefix_caching=False, **window) as llm:
        alone = [
            result(llm.generate([prompt], each, use_tqdm=False)[0].outputs[0])
            for prompt, each in zip(prompts, params, strict=True)
        ]
    swap = {"preemption_mode": "swap", "swap_space": "1MiB"}
    for settings in (
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7, "num_threads": 3},
        {"num_threads": 2},
        {"num_blocks": tight},
        {"num_blocks": tight, **swap},
    ):
        with open_llm(history(SEED), **settings, **window) as llm:
            for _ in range(2):
                outs = llm.generate(prompts, params, use_tqdm=False)
                assert [result(out.outputs[0]) for out in outs] == alone
            assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)
            assert "num_blocks" in settings or llm.stats().prefix_cache_hit_tokens > 0
            assert_idle_and_whole(llm)


def test_more_blocks_of_the_same_memory(history: Folders) -> None:
    """A token takes D + 4 bytes of K and of V a head where float32 takes 4 D, so that memory holds that many more blocks."""
    counts = {}
    for kind in ("float32", "int8"):
        with open_llm(history(SEED), kv_cache_dtype=kind, num_blocks=None, kv_cache_memory="96KiB") as llm:
            counts[kind] = llm.stats().num_blocks
            assert llm.info.kv_cache_bytes == 96 << 10
    assert counts["int8"] * (8 + 4) == counts["float32"] * 4 * 8


def test_cuda_refuses_it(history: Folders) -> None:
    """Where there are no kernels for it, an engine is refused before anything is loaded, and so is a report on it."""
    pytest.importorskip("numba_cuda")
    for call in (open_llm, inspect):
        with pytest.raises(
            InvalidArgumentError, match=r"kv_cache_dtype='int8' is not allowed on the device 'cuda-sim'.*'float16'"
        ):
            call(history(SEED), device="cuda-sim")
    with open_llm(history(SEED), device="cuda-sim", kv_cache_dtype="float16", num_blocks=2):
        pass


def inspect(folder: Path, device: str) -> None:
    """A report on the model with K and V in int8."""
    inspect_model(str(folder), device=device, kv_cache_dtype="int8")


def test_weights_have_no_such_dtype(history: Folders) -> None:
    """int8 is a dtype of K and V; weights are quantised by another name, and the error of either tells what is allowed."""
    with pytest.raises(InvalidArgumentError, match=r"dtype='int8' is not allowed.*'float16'$"):
        open_llm(history(SEED), dtype="int8")
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_dtype='int4' is not allowed.*'int8'"):
        open_llm(history(SEED), kv_cache_dtype="int4")
