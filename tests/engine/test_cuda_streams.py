"""``device="cuda"`` from end to end without a GPU: on a stand-in where all happens as late as CUDA allows."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import models
from helpers.checks import assert_idle_and_whole, greedy_params, run_to_end
from helpers.fake_gpu import Gpu

from minipage import LLM, BeamSearchParams, SamplingParams
from minipage.engine.runner import Runner

SEED = 3
#: So small that the simulator runs ten steps in two seconds.
CONFIG = models.HISTORY_CONFIG | {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
PROMPT = [3, 17, 8, 30, 1, 22, 9, 14, 27, 5]
OPTIONS = {"dtype": "float32", "block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 12, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_folder(tmp_path_factory.mktemp("tiny"), CONFIG, models.history_tensors(SEED, CONFIG))


@pytest.fixture
def seen(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps went ahead, and how many of which kind were recorded."""
    found: Counter[str] = Counter()

    def count(name: str) -> None:
        method = getattr(Runner, name)

        def counted(runner: Runner, *given: Any) -> Any:
            found[name] += 1
            return method(runner, *given)

        monkeypatch.setattr(Runner, name, counted)

    for name in ("execute_next", "_record_next", "_record_forward"):
        count(name)
    return found


def sampled(max_tokens: int, seed: int = 5, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **options)


Asks = list[tuple[list[int], Any]]


def tokens(output: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


def serve(llm: LLM, asks: Asks) -> list[Any]:
    """The tokens of all completions of some requests that run together."""
    for index, (prompt, params) in enumerate(asks):
        llm.engine.add_request(str(index), prompt, params)
    done = run_to_end(llm)
    return [tokens(done[str(index)]) for index in range(len(asks))]


def serve_with_abort(llm: LLM, asks: Asks) -> list[Any]:
    """The same, but the first request is gone when it has two tokens, and another comes in its place."""
    for index, (prompt, params) in enumerate(asks[:-1]):
        llm.engine.add_request(str(index), prompt, params)
    while len(tokens(llm.engine.step()[0])[0]) < 2:
        pass
    aborted = llm.engine.abort("0")
    llm.engine.add_request("late", *asks[-1])
    done = run_to_end(llm)
    return [tokens(aborted), *(tokens(done[name]) for name in (*map(str, range(1, len(asks) - 1)), "late"))]


def serve_twice(llm: LLM, asks: Asks) -> list[Any]:
    """One after the other, and again."""
    return [serve(llm, [ask]) for ask in [*asks, *asks]]


class Scene(NamedTuple):
    """Requests, the engine that they meet, and what shows that it did what it is for."""

    asks: Asks
    happened: Callable[[Counter[str]], int]
    options: dict[str, Any] = {}  # noqa: RUF012
    play: Callable[[LLM, Asks], Any] = serve
    truth: str = "cpu"  #: which never goes ahead and draws nothing


MIXED = [
    (PROMPT, greedy_params(9)),
    (PROMPT[:3], sampled(6)),
    (PROMPT[2:7], sampled(13, 6, top_p=0.9, temperature=1.5)),
    (PROMPT[5:], greedy_params(2)),
    (PROMPT[1:4], sampled(4, 7, top_k=5)),
]
CROWD = [(PROMPT[:4], greedy_params(10)), (PROMPT[4:8], sampled(6, n=2))]

SCENES = {
    "mixed": Scene(MIXED, lambda seen: seen["execute_next"] > seen["_record_next"] > 1),
    "parallel samples": Scene([(PROMPT[:6], sampled(6, n=3))], lambda seen: seen["cow_copies"]),
    "beams": Scene(
        [(PROMPT[:3], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))], lambda seen: seen["cow_copies"]
    ),
    "prefix hits": Scene([(PROMPT, greedy_params(3))], lambda seen: seen["prefix_cache_hit_tokens"], play=serve_twice),
    "swap": Scene(
        CROWD,
        lambda seen: seen["swapped_in_blocks"],
        {"num_blocks": 5, "preemption_mode": "swap", "swap_space": "1MiB"},
    ),
    "recompute": Scene(CROWD, lambda seen: seen["preemptions"], {"num_blocks": 5}),
    "window and sinks": Scene(
        [(PROMPT, greedy_params(8)), (PROMPT[:2], sampled(8))],
        lambda seen: seen["execute_next"],
        {"sliding_window": 5, "attention_sinks": 2},
    ),
    "abort": Scene(
        [(PROMPT, greedy_params(9)), (PROMPT[:5], sampled(7)), (PROMPT[3:8], greedy_params(4))],
        lambda seen: seen["execute_next"],
        play=serve_with_abort,
    ),
    "logprobs beside plain": Scene(
        [(PROMPT[:4], greedy_params(6, logprobs=2)), (PROMPT[4:], sampled(8)), (PROMPT[:2], greedy_params(3))],
        lambda seen: seen["execute_next"],
    ),
    "drafts": Scene(
        [(PROMPT[:3] * 3, greedy_params(6)), (PROMPT[:5], sampled(4))],
        lambda seen: seen["generation_tokens"],
        {"speculative": "ngram"},
    ),
    "int4": Scene(
        [(PROMPT, greedy_params(3))],
        lambda seen: seen["_record_next"],
        {"quantization": "int4"},
        truth="reference",  # the CPU quantises what a layer gets as well
    ),
    "bfloat16": Scene([(PROMPT, greedy_params(4))], lambda seen: seen["_record_next"], {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", SCENES)
def test_tokens_are_those_of_the_host(folder: Path, seen: Counter[str], name: str) -> None:
    """Whatever goes ahead, is padded, copied, moved or taken away, late as all of it happens."""
    scene = SCENES[name]
    found = {}
    for device in (scene.truth, "cuda"):
        seen.clear()
        with LLM(str(folder), device=device, **OPTIONS | scene.options) as llm:
            found[device] = scene.play(llm, scene.asks)
            assert_idle_and_whole(llm)
            seen.update(asdict(llm.stats()))
    assert scene.happened(seen)
    assert found["cuda"] == found[scene.truth]


def test_a_gpu_serves_one_engine_after_the_other(folder: Path, seen: Counter[str], tmp_path: Path) -> None:
    """Blocks that one has computed and saved are those of the next; whose streams and scratch memory may be the first one's."""
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(folder), device=device, **OPTIONS) as first:
            found[device] = serve(first, [(PROMPT, sampled(4))])
            assert first.save_prefix_cache(tmp_path / device) > 0
        with LLM(str(folder), device=device, **OPTIONS) as second:
            assert second.load_prefix_cache(tmp_path / device) > 0
            found[device] += serve(second, [(PROMPT, sampled(4)), (PROMPT[:5], greedy_params(4))])
            assert second.stats().prefix_cache_hit_tokens > 0
    assert found["cuda"] == found["cpu"]


def test_engines_share_a_gpu(folder: Path, seen: Counter[str]) -> None:
    """Each has a stream of its own, which waits for nothing that the other does."""
    asks = [(PROMPT[:4], sampled(5)), (PROMPT[2:5], greedy_params(6))]
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(folder), device=device, **OPTIONS) as one, LLM(str(folder), device=device, **OPTIONS) as other:
            for llm, (prompt, params) in zip((one, other), asks, strict=True):
                llm.engine.add_request("it", prompt, params)
            done: dict[LLM, Any] = {}
            while len(done) < 2:
                for llm in (one, other):
                    done.update((llm, tokens(output)) for output in llm.engine.step() if output.finished)
            found[device] = [done[one], done[other]]
    assert found["cuda"] == found["cpu"]


def test_an_engine_that_is_closed_leaves_no_memory(folder: Path, gpu: Gpu) -> None:
    """Weights, pages, buffers, recordings and pinned memory are gone with it; not the scratch memory, which is for the next."""
    with LLM(str(folder), device="cuda", **OPTIONS | {"swap_space": "1MiB", "preemption_mode": "swap"}) as llm:
        serve(llm, [(PROMPT[:4], greedy_params(5))])
        held = gpu.held_bytes
    del llm
    gc.collect()
    gpu.wait_for_all()
    assert held > 1 << 20 and gpu.held_bytes < held // 10
