"""Requests that give their blocks up and come back show no trace of it: tokens, logprobs, text and stream, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import models
from helpers.checks import TIGHT, Canary, assert_clean, assert_idle_and_whole, generate_ids, result
from helpers.pressure import Ask, Seen, Watch, assert_limits, byte_model, finish, poison, serve

from minipage import LLM, BeamSearchParams, SamplingParams
from minipage.engine.request import Status
from minipage.engine.step import Step

MODEL_SEED = 3
VOCAB = 256  #: the bytes of the tokenizer
#: What the two layers of the model see, as keywords of config.json.
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
    "mixed": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}

Params = SamplingParams | BeamSearchParams
Folders = Callable[[str], Path]


class Crowd(NamedTuple):
    """Requests that outgrow a pool together, though each of them fits alone."""

    params: tuple[Params, ...]
    num_blocks: dict[str, int]  #: of the tight pool, by window


def sampled(seed: int, max_tokens: int, **changes: Any) -> SamplingParams:
    """Every other seed is greedy."""
    return SamplingParams(
        **{"temperature": 1.2 * (seed % 2), "seed": seed, "max_tokens": max_tokens, "logprobs": 2, **changes}
    )


def beams(width: int, max_tokens: int, **changes: Any) -> BeamSearchParams:
    """A search that ends at nothing but its length."""
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True, **changes)


CROWDS = {
    "n=1": Crowd(
        (
            sampled(0, 24, prompt_logprobs=1),
            sampled(1, 24),
            sampled(2, 20, repetition_penalty=1.5, frequency_penalty=0.4),
            sampled(3, 24, stop=["\x00\x01", "zq"], presence_penalty=0.7),
            sampled(5, 20, min_tokens=3),
            sampled(7, 16),
        ),
        {"full": 12, "window": 8, "mixed": 20},
    ),
    "n=3": Crowd(
        (
            sampled(1, 16, n=3),
            sampled(3, 12, n=3, stop_token_ids=list(range(0, 256, 9))),
            sampled(5, 16, n=3),
            sampled(7, 14, n=2),
        ),
        {"full": 15, "window": 15, "mixed": 31},
    ),
    "beams": Crowd(
        (
            beams(3, 12),
            beams(4, 9, length_penalty=0.5, early_stopping=True),
            sampled(1, 16),
            beams(2, 12, n=1),
            beams(3, 10, length_penalty=0.0, early_stopping="never"),
        ),
        {"full": 14, "window": 15, "mixed": 28},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model by what its layers see."""
    return cache(lambda window: byte_model(tmp_path_factory.mktemp(window), MODEL_SEED, **WINDOWS[window]))


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens, all of them full of NaN."""
    llm = LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_threads": 1, **options})
    poison(llm)
    return llm


def asks_of(crowd: str) -> list[Ask]:
    """The requests of a crowd; two prompts begin alike."""
    rng = np.random.default_rng(len(crowd))
    prompts = [[int(t) for t in rng.integers(0, VOCAB, n)] for n in (9, 5, 2, 3, 3, 2)]
    prompts[1][:4] = prompts[0][:4]
    return [Ask(prompt, params) for prompt, params in zip(prompts, CROWDS[crowd].params, strict=False)]


@pytest.fixture(scope="module")
def roomy(folder: Folders) -> Callable[[str, str], list[Seen]]:
    """What the requests of a crowd get one after the other, where there is room for all of them."""

    @cache
    def run(window: str, crowd: str) -> list[Seen]:
        with open_llm(folder(window), num_blocks=200, enable_prefix_caching=False) as llm:
            seen = [serve(llm, [ask])[0] for ask in asks_of(crowd)]
            assert llm.stats().preemptions == 0
            return seen

    return run


#: With 3 blocks in the host pool some of these requests fit, with 1 hardly any.
MODES: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"preemption_mode": "swap", "host_blocks": 100},
    "swap to 3 blocks": {"preemption_mode": "swap", "host_blocks": 3},
    "swap to 1 block": {"preemption_mode": "swap", "host_blocks": 1},
    "auto": {"preemption_mode": "auto", "host_blocks": 100},
}


def tight_llm(folder: Path, crowd: str, window: str, mode: str, **options: Any) -> LLM:
    """An engine that is too small for a crowd."""
    num_layers = 1 if window == "mixed" else 2
    block_bytes = 4 * num_layers * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, head size, bytes
    keywords = dict(MODES[mode])
    keywords["swap_space"] = keywords.pop("host_blocks", 0) * block_bytes
    return open_llm(folder, num_blocks=CROWDS[crowd].num_blocks[window], **keywords, **options)


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_no_trace(
    folder: Folders,
    roomy: Callable[[str, str], list[Seen]],
    crowd: str,
    window: str,
    mode: str,
    caching: bool,
) -> None:
    """Under memory pressure every request sees what it sees in a roomy engine, and the counters tell what happened."""
    options = {"enable_prefix_caching": caching, "max_num_batched_tokens": 20 if caching else 64}
    with tight_llm(folder(window), crowd, window, mode, **options) as llm:
        swaps = watch_swaps(llm)
        assert serve(llm, asks_of(crowd)) == roomy(window, crowd)
        stats = llm.stats()
        assert stats.preemptions > 0
        moved = [blocks for blocks in swaps if blocks is not None]
        assert stats.swapped_out_blocks == stats.swapped_in_blocks == sum(moved)
        if mode == "recompute":
            assert not swaps
        elif mode == "swap":
            assert len(moved) == stats.preemptions
        elif mode != "auto":
            assert len(swaps) == stats.preemptions
            assert mode != "swap to 1 block" or None in swaps, "some had to be computed again"


def watch_swaps(llm: LLM) -> list[int | None]:
    """Grows with each attempt to swap a request out: how many blocks went, None where the host pool was short."""
    swaps: list[int | None] = []
    blocks = llm.engine._scheduler.blocks
    swap_out = blocks.swap_out

    def watched(sequences: Any) -> Any:
        distinct = {block for tables in sequences for block in tables.blocks if block >= 0}
        moves = swap_out(sequences)
        assert moves is None or sorted(move.src for move in moves) == sorted(distinct), "shared blocks go once"
        swaps.append(None if moves is None else len(moves))
        return moves

    blocks.swap_out = watched  # type: ignore[method-assign]
    return swaps


def test_seeded_sampling_survives(history: Callable[[int], Path], canary: Callable[[int], Canary]) -> None:
    """A seeded request draws the same tokens alone, in a crowd, preempted either way, in any chunks, cached or not."""
    prompts = [models.history_prompt(6, 9 + i)[i:] for i in range(4)]
    params = SamplingParams(temperature=1.3, seed=1234, max_tokens=24, ignore_eos=True)
    swap: dict[str, Any] = {"preemption_mode": "swap", "swap_space": "1MiB"}
    runs: list[tuple[bool, dict[str, Any]]] = [
        (True, TIGHT),
        (True, TIGHT | swap),
        (True, TIGHT | swap | {"enable_prefix_caching": False}),
        *((False, {"num_blocks": 64, "max_num_batched_tokens": budget}) for budget in (3, 5, 64)),
    ]
    with open_llm(history(6), num_blocks=64, enable_prefix_caching=False) as llm:
        alone = [generate_ids(llm, [prompt], params)[0] for prompt in prompts]
    for is_tight, options in runs:
        with open_llm(history(6), **options) as llm:
            assert generate_ids(llm, prompts, params) == alone
            assert generate_ids(llm, prompts, params) == alone  # now they may be cached
            assert (llm.stats().preemptions > 0) == is_tight
            assert_clean(llm, canary(6))


# ---- ended while they are away -----------------------------------------------------------------------------------------


def step_until_swapped(llm: LLM, watch: Watch) -> str:
    """Step until a request is in the host pool; its name."""
    while True:
        watch.take(llm.engine.step())
        assert_limits(llm)
        for name, tracked in llm.engine._tracked.items():
            if tracked.request.status is Status.SWAPPED:
                return name


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_aborted_while_swapped(
    folder: Folders, roomy: Callable[[str, str], list[Seen]], crowd: str, window: str
) -> None:
    """An abort gives blocks in the host pool back, ends the request with what it had, and disturbs nobody."""
    asks, expected = asks_of(crowd), roomy(window, crowd)
    with tight_llm(folder(window), crowd, window, "swap") as llm:
        host = llm.engine._scheduler.blocks.host
        assert host is not None
        watch = Watch()
        for name, ask in enumerate(asks):
            llm.engine.add_request(str(name), ask.prompt, ask.params)
        swapped = step_until_swapped(llm, watch)
        assert llm.stats().num_swapped == 1
        assert host.num_blocks - host.num_free_blocks == llm.stats().swapped_out_blocks > 0
        out = llm.engine.abort(swapped)
        assert out is not None and out.finished
        watch.take([out])
        assert host.num_free_blocks == host.num_blocks
        assert llm.stats().num_swapped == 0
        llm.check_integrity()
        if isinstance(asks[int(swapped)].params, SamplingParams):
            for output, whole in zip(out.outputs, expected[int(swapped)].results, strict=True):
                part = result(output)
                assert output.finish_reason in ("abort", whole.finish_reason)
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]
                assert part.logprobs == whole.logprobs[: len(part.logprobs)]
        finish(llm, watch)
        assert llm.stats().swapped_in_blocks < llm.stats().swapped_out_blocks
        for name, seen in enumerate(expected):
            assert str(name) == swapped or watch.seen(str(name)) == seen


def test_closed_while_swapped(folder: Folders) -> None:
    """An engine that is closed ends all of its requests, those in the host pool among them."""
    llm = tight_llm(folder("full"), "n=3", "full", "swap")
    for name, ask in enumerate(asks_of("n=3")):
        llm.engine.add_request(str(name), ask.prompt, ask.params)
    step_until_swapped(llm, Watch())
    llm.close()
    assert_idle_and_whole(llm)
    host = llm.engine._scheduler.blocks.host
    assert host is not None and host.num_free_blocks == host.num_blocks


# ---- a step that fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [False, True], ids=["before the swaps", "after the step"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("crowd", CROWDS)
def test_failed_step(
    folder: Folders,
    roomy: Callable[[str, str], list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
    crowd: str,
    mode: str,
    made: bool,
) -> None:
    """Where the model fails in a step that preempts, the requests of the step end and those preempted show no trace."""
    asks, expected = asks_of(crowd), roomy("full", crowd)
    with tight_llm(folder("full"), crowd, "full", mode) as llm:
        execute = llm.engine.runner.execute

        def fail(step: Step) -> None:
            if not step.preempted:
                execute(step)
                return
            if made:
                execute(step)
            monkeypatch.undo()
            raise MemoryError("the device is full")

        monkeypatch.setattr(llm.engine.runner, "execute", fail)
        watch = Watch()
        for name, ask in enumerate(asks):
            llm.engine.add_request(str(name), ask.prompt, ask.params)
        with pytest.raises(MemoryError):
            finish(llm, watch)
        llm.check_integrity()
        survivors = [name for name in range(len(asks)) if str(name) in llm.engine._tracked]
        assert 0 < len(survivors) < len(asks)
        finish(llm, watch)
        assert [watch.seen(str(name)) for name in survivors] == [expected[name] for name in survivors]
