"""Rolling KV cache: layers with a window hold a few blocks whatever the length, and say what REF says with that window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.beams import beam_search
from helpers.checks import assert_idle_and_whole, generate_ids, greedy_params, logprob_matrix, result
from helpers.pressure import Ask, Watch, all_tables, assert_limits, draw, finish, poison, serve

from minipage import LLM, BeamSearchParams, InvalidArgumentError, SamplingParams
from minipage.outputs import RequestOutput

SEED = 10
VOCAB = models.VOCAB_SIZE
WINDOW, BLOCK = 8, 4
TOLERANCE = 1e-4

Folders = Callable[[int], Path]


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine on the CPU in float32 with a window of 8 and blocks of 4, all of them full of NaN."""
    options = {"block_size": BLOCK, "num_blocks": 400, "sliding_window": WINDOW} | options
    llm = LLM(str(folder), device="cpu", dtype="float32", **options)
    poison(llm)
    return llm


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """A random prompt of each length."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, VOCAB, n)] for n in lengths]


def scored(max_tokens: int) -> SamplingParams:
    """Greedy, with all logprobs of prompt and output."""
    return greedy_params(max_tokens, logprobs=VOCAB, prompt_logprobs=VOCAB)


def assert_is_ref(model: ref.Reference, out: RequestOutput, window: ref.Window) -> None:
    """Every distribution, of the prompt's tokens and of the outputs', is REF's."""
    [output] = out.outputs
    assert out.prompt_logprobs is not None and output.logprobs is not None
    tokens = [*out.prompt_token_ids, *output.token_ids]
    expected = ref.log_softmax(model.logits(tokens[:-1], window))
    found = logprob_matrix([*out.prompt_logprobs[1:], *output.logprobs], VOCAB)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    assert output.token_ids == list(expected[len(out.prompt_token_ids) - 1 :].argmax(axis=-1))


# ---- one window for all layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "caching"), [(1, False), (3, True), (5, False), (8, True), (64, False), (64, True)])
def test_every_length(history: Folders, oracle: Callable[[int], ref.Reference], budget: int, caching: bool) -> None:
    """Prompts of 1 to 40 tokens together, in chunks of any size, have REF's distributions with that window."""
    with open_llm(history(SEED), max_num_batched_tokens=budget, enable_prefix_caching=caching, max_num_seqs=16) as llm:
        watch = Watch()
        for length, prompt in enumerate(prompts_of(range(1, 41)), start=1):
            llm.engine.add_request(str(length), prompt, scored(10))
        finish(llm, watch)
        for out in watch.last.values():
            assert_is_ref(oracle(SEED), out, WINDOW)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 9, 16])
def test_windows_and_block_sizes(
    history: Folders, oracle: Callable[[int], ref.Reference], window: int, block_size: int
) -> None:
    """A window need not be a number of blocks, nor more than one block."""
    with open_llm(history(SEED), sliding_window=window, block_size=block_size, max_num_batched_tokens=20) as llm:
        for out in llm.generate(prompts_of([1, 6, 17, 34]), scored(12), use_tqdm=False):
            assert_is_ref(oracle(SEED), out, window)
        assert_idle_and_whole(llm)


def test_a_window_of_everything_is_none(history: Folders) -> None:
    """A window that no sequence outgrows changes not a bit."""
    asks = [Ask(prompt, scored(8)) for prompt in prompts_of([1, 9, 40])]
    with open_llm(history(SEED), sliding_window=None) as llm:
        whole = serve(llm, asks)
    with open_llm(history(SEED), sliding_window=47) as llm:
        assert serve(llm, asks) == whole
    with open_llm(history(SEED), sliding_window=46) as llm:  # the last token does not see the first one
        assert serve(llm, asks) != whole


def test_longer_than_the_pool(history: Folders, oracle: Callable[[int], ref.Reference]) -> None:
    """A prompt of 120 tokens and 50 more run in a pool of 5 blocks; where a window does not fit either, it is refused."""
    [prompt] = prompts_of([120])
    expected = ref.greedy(oracle(SEED), prompt, 50, WINDOW)
    for caching in (False, True):
        with open_llm(history(SEED), num_blocks=5, enable_prefix_caching=caching) as llm:
            llm.engine.add_request("long", prompt, greedy_params(50))
            watch = Watch()
            finish(llm, watch)
            assert watch.last["long"].outputs[0].token_ids == expected
            assert generate_ids(llm, [prompt, prompt], greedy_params(50)) == [expected] * 2
    with open_llm(history(SEED), num_blocks=4) as llm, pytest.raises(InvalidArgumentError, match="120 tokens"):
        llm.engine.add_request("long", prompt, greedy_params(50))


def test_held_blocks_do_not_grow(history: Folders) -> None:
    """From the window's length on, a sequence holds 2 or 3 blocks for a window of 2, as long as it lives."""
    with open_llm(history(SEED), enable_prefix_caching=False) as llm:
        llm.engine.add_request("long", prompts_of([3])[0], greedy_params(120))
        held = []
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            assert_limits(llm)
            held.append(llm.stats().num_blocks - llm.stats().num_free_blocks)
        assert held[:6] == [1, 1, 2, 2, 2, 2]
        assert set(held[9:-1]) == {2, 3} and max(held) == -(-WINDOW // BLOCK) + 1
        assert held[-1] == 0


# ---- shared tables that roll -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 8, 9, 20])
def test_forks_past_the_window(history: Folders, oracle: Callable[[int], ref.Reference], length: int) -> None:
    """Children whose tables wrap many times, some of them ended early, are what REF draws for each; so are beams."""
    model, prompt = oracle(SEED), models.history_prompt(SEED, length)
    stops = [7, 21, 33, 40]
    drawn = [draw(model, prompt, 40, 1.1, 77, child, WINDOW) for child in range(4)]
    ends = [next((i + 1 for i, token in enumerate(tokens) if token in stops), 40) for tokens in drawn]
    assert len(set(ends)) > 1, "children are to end at different times"
    params = SamplingParams(n=4, temperature=1.1, seed=77, max_tokens=40, stop_token_ids=stops, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=40)
    asks = [Ask(prompt, params), Ask(prompt, beams), Ask(prompt[:4], beams)]
    with open_llm(history(SEED)) as llm:
        alone = [serve(llm, [ask])[0] for ask in asks]
    assert [list(each.token_ids) for each in alone[0].results] == [
        tokens[:end] for tokens, end in zip(drawn, ends, strict=True)
    ]
    for caching in (False, True):
        with open_llm(history(SEED), num_blocks=20, enable_prefix_caching=caching) as llm:
            assert serve(llm, asks) == alone


def test_beams_past_the_window(history: Folders, oracle: Callable[[int], ref.Reference]) -> None:
    """Beams over a rolling cache find what a search finds that computes everything anew, with that window."""
    model, compared = oracle(SEED), 0
    with open_llm(history(SEED)) as llm:
        for prompt in prompts_of([5, 8, 9, 20, 5, 8, 9, 20]):
            expected = beam_search(
                lambda tokens, prompt=prompt: ref.log_softmax(model.logits([*prompt, *tokens], WINDOW)[-1]),
                width=3,
                max_tokens=14,
            )
            if expected.gap > 5e-4:
                [out] = llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=14), use_tqdm=False)
                assert [tuple(output.token_ids) for output in out.outputs] == [f.token_ids for f in expected.found]
                compared += 1
        assert compared >= 3


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_children_are_admitted_again(history: Folders, mode: str) -> None:
    """A pool that holds children only as far as they share a prompt takes them back after a preemption."""
    asks = [
        Ask([1, 2], greedy_params(30)),
        Ask(prompts_of([8])[0], SamplingParams(n=4, seed=1, max_tokens=4, ignore_eos=True)),
    ]
    with open_llm(history(SEED)) as llm:
        alone = [serve(llm, [ask])[0] for ask in asks]
    swap: dict[str, Any] = {"preemption_mode": "swap", "swap_space": "1MiB"} if mode == "swap" else {}
    with open_llm(history(SEED), num_blocks=6, enable_prefix_caching=False, **swap) as llm:
        assert serve(llm, asks) == alone
        assert llm.stats().preemptions > 0


# ---- windows by layer --------------------------------------------------------------------------------------------------


def layers_model(folder: Path, windows: Sequence[int], **config: Any) -> Path:
    """A history model whose layers have these windows, 0 for none."""
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    config = config or {"layer_types": kinds}
    return models.history_model(folder, SEED, num_hidden_layers=len(windows), sliding_window=WINDOW, **config)


LAYERS: dict[str, tuple[list[int], dict[str, Any], int]] = {  #: windows, how the config says so, groups
    "one without": ([8, 0, 8, 8], {}, 4),
    "half and half": ([8, 0, 8, 0], {}, 2),
    "a last group of one": ([0, 8, 8, 8, 0], {}, 3),
    "from layer 1 on": ([0, 8, 8], {"use_sliding_window": True, "max_window_layers": 1}, 3),
}


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("kind", LAYERS)
def test_windows_by_layer(tmp_path: Path, kind: str, budget: int) -> None:
    """Layers with and without a window have tables of their own in one pool, and REF's distributions; the full ones keep all."""
    windows, config, num_groups = LAYERS[kind]
    folder = layers_model(tmp_path / "model", windows, **config)
    model = ref.Reference(folder)
    with open_llm(folder, sliding_window=None, max_num_batched_tokens=budget) as llm:
        assert len(llm.engine._scheduler.blocks.groups) == num_groups
        watch = Watch()
        for name, prompt in enumerate(prompts_of([1, 4, 7, 8, 9, 13, 26])):
            llm.engine.add_request(str(name), prompt, scored(12))
        for _ in range(30 if budget == 3 else 3):
            watch.take(llm.engine.step())
            for tables in all_tables(llm):
                for group, table in zip(llm.engine._scheduler.blocks.groups, tables.tables, strict=True):
                    assert table.num_tokens == tables.num_tokens
                    assert group.window or -1 not in table.blocks
        finish(llm, watch)
        for out in watch.last.values():
            assert_is_ref(model, out, windows)


@pytest.mark.parametrize("kind", LAYERS)
def test_sharing_with_windows_by_layer(tmp_path: Path, kind: str) -> None:
    """Children, beams and cached prompts over mixed layers are what they are alone, in a tight pool and in a roomy one."""
    windows, config, num_groups = LAYERS[kind]
    folder = layers_model(tmp_path / "model", windows, **config)
    model, prompt = ref.Reference(folder), models.history_prompt(SEED, 13)
    sampled = SamplingParams(n=3, temperature=1.1, seed=3, max_tokens=16, ignore_eos=True)
    asks = [
        Ask(prompt, sampled),
        Ask([*prompt[:9], 1, 2], BeamSearchParams(beam_width=3, max_tokens=12)),
        Ask(prompt[:3], greedy_params(30)),
        Ask(prompt, greedy_params(9)),
    ]
    with open_llm(folder, sliding_window=None, enable_prefix_caching=False) as llm:
        alone = [serve(llm, [ask])[0] for ask in asks]
    drawn = [draw(model, prompt, 16, 1.1, 3, child, windows) for child in range(3)]
    assert [list(each.token_ids) for each in alone[0].results] == drawn
    for mode in ("recompute", "swap"):
        swap: dict[str, Any] = {"preemption_mode": "swap", "swap_space": "1MiB"} if mode == "swap" else {}
        with open_llm(folder, sliding_window=None, num_blocks=16 * num_groups, **swap) as llm:
            assert serve(llm, asks) == alone
            assert llm.stats().preemptions > 0
            assert serve(llm, asks[::-1]) == alone[::-1]
            assert llm.stats().prefix_cache_hit_tokens > 0


# ---- prefix hits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["window", "mixed"])
def test_hits_need_only_what_is_seen(tmp_path: Path, history: Folders, kind: str) -> None:
    """A prompt is found again to its last block, by who goes on from its end and by who turns off before; bits are the same."""
    folder = layers_model(tmp_path / "model", [8, 0]) if kind == "mixed" else history(SEED)
    options = {"sliding_window": None} if kind == "mixed" else {}
    [prompt, other] = prompts_of([41, 20])
    asks = [prompt, [*prompt, 3, 4, 5], prompt[:22] + other, prompt[:7], other]
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=3, ignore_eos=True)
    with open_llm(folder, enable_prefix_caching=False, **options) as llm:
        cold = [result(llm.generate([each], params, use_tqdm=False)[0].outputs[0]) for each in asks]
    with open_llm(folder, **options) as llm:
        cached = []
        for _ in range(2):
            for each, expected in zip(asks, cold, strict=True):
                [out] = llm.generate([each], params, use_tqdm=False)
                assert result(out.outputs[0]) == expected
                cached.append(out.num_cached_tokens)
        assert cached[0] == 0 and cached[1] == 40 and cached[2] == 20
        assert cached[5:] == [40, 40, 40, 4, 16]
        assert_idle_and_whole(llm)
