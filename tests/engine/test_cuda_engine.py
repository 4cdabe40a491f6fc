"""The whole engine on the CUDA kernels, in the simulator: what shares, copies, moves and forgets blocks there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import models
from helpers.checks import assert_idle_and_whole, greedy_params

from minipage import LLM, BeamSearchParams, SamplingParams
from minipage.outputs import RequestOutput

pytest.importorskip("numba_cuda")

SEED = 10
BEAMS = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
PROMPT = models.history_prompt(SEED, 9)


def serve(llm: LLM, asks: list[tuple[list[int], Any]]) -> list[list[list[int]]]:
    """The tokens of all completions of some requests that run together."""
    for index, (prompt, params) in enumerate(asks):
        llm.engine.add_request(str(index), prompt, params)
    done: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in llm.engine.step() if output.finished)
    return [[list(one.token_ids) for one in done[str(i)].outputs] for i in range(len(asks))]


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(seed=5, max_tokens=8, ignore_eos=True, **options)


#: Two requests that do not fit side by side to their ends.
CROWD = [(PROMPT[:4], greedy_params(12)), (PROMPT[4:8], sampled(n=2))]


class Scene(NamedTuple):
    """Requests, the engine that they meet, and what shows that it did what it is for."""

    options: dict[str, Any]
    asks: list[list[tuple[list[int], Any]]]  #: one list after the other
    happened: Callable[[Any], int]


SCENES = {
    "parallel samples": Scene({}, [[(PROMPT[:6], sampled(n=3))]], lambda stats: stats.cow_copies),
    "beams": Scene({}, [[(PROMPT[:3], BEAMS)]], lambda stats: stats.cow_copies),
    "prefix hits": Scene(
        {}, [[(PROMPT, greedy_params(2))], [(PROMPT, greedy_params(4))]], lambda stats: stats.prefix_cache_hit_tokens
    ),
    "swap": Scene(
        {"num_blocks": 6, "preemption_mode": "swap", "swap_space": "1MiB"},
        [CROWD],
        lambda stats: stats.swapped_in_blocks,
    ),
    "recompute": Scene(
        {"num_blocks": 6},
        [CROWD],
        lambda stats: stats.preemptions,
    ),
    "window and sinks": Scene(
        {"sliding_window": 5, "attention_sinks": 2, "num_blocks": 6},
        [[(PROMPT, greedy_params(12))]],
        lambda stats: stats.generation_tokens,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCENES)
def test_tokens_are_those_of_the_cpu(history: Callable[[int], Path], name: str, dtype: str) -> None:
    """Whatever happens to blocks, and with decode steps padded, the tokens are the same."""
    scene = SCENES[name]
    options = {"dtype": dtype, "block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 8} | scene.options
    tokens = {}
    for device in ("cpu", "cuda-sim"):
        with LLM(str(history(SEED)), device=device, **options) as llm:
            tokens[device] = [serve(llm, asks) for asks in scene.asks]
            assert scene.happened(llm.stats()) > 0
            assert_idle_and_whole(llm)
    assert tokens["cuda-sim"] == tokens["cpu"]
