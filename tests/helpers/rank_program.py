"""A program for one rank or several: it serves requests of all kinds with one LLM, and rank 0 prints what came of them as JSON.

    mpiexec -n 2 python -m helpers.rank_program '{"model": ..., "tensor_parallel_size": 2, ...}' [TROUBLE RANK]

TROUBLE, a name of :data:`TROUBLES`, befalls the rank RANK; with "padded-" before it, all pad their steps as a GPU does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from helpers import models

from minipage import LLM, BeamSearchParams, SamplingParams
from minipage.device.communicator import MpiCommunicator
from minipage.device.cpu import CpuDevice
from minipage.device.cuda import PaddedDevice
from minipage.engine import loading
from minipage.kernels import reference

MAX_TOKENS = 20
SEEDS = (3, 5, 6, 11)


def serve(llm: LLM) -> dict[str, Any]:
    """Greedy and sampled, several of one prompt, beams, prefix hits, preemption, an abort; tokens, and what was counted."""
    prompts = [models.history_prompt(seed) for seed in SEEDS]
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2)
    sampled = SamplingParams(temperature=0.7, max_tokens=MAX_TOKENS, seed=7)
    found = {"greedy": generated(llm, prompts, greedy), "sampled": generated(llm, prompts, sampled)}
    found["three"] = generated(llm, prompts[:1], replace(sampled, n=3, max_tokens=8))
    [beams] = llm.beam_search([prompts[1]], BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)
    found["beams"] = [list(completion.token_ids) for completion in beams.outputs]
    for name in ("kept", "aborted"):
        llm.engine.add_request(name, prompts[0], greedy)
    for _ in range(4):
        llm.engine.step()
    output = llm.engine.abort("aborted")
    assert output is not None
    found["aborted"] = [list(output.outputs[0].token_ids)]
    found["afterwards"] = generated(llm, prompts[1:2], greedy)
    llm.check_integrity()
    stats = llm.stats()
    counted = {name: getattr(stats, name) for name in ("preemptions", "swapped_in_blocks", "cow_copies")}
    counted["hit_tokens"] = stats.prefix_cache_hit_tokens
    return {
        "tokens": found,
        "counted": counted,
        "gap": smallest_gap(llm, prompts),
        "weight_bytes": llm.info.weight_bytes,
    }


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The tokens of all completions."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def smallest_gap(llm: LLM, prompts: list[list[int]]) -> float:
    """How much more likely, as a logprob, the best token of a greedy step was than the next, at least."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2), use_tqdm=False)
    steps = [sorted(step.values(), key=lambda each: each.rank) for o in outputs for step in o.outputs[0].logprobs or ()]
    return min(best.logprob - second.logprob for best, second, *_ in steps)


# ---- troubles --------------------------------------------------------------------------------------------------------


def fail_in_a_sum() -> None:
    """A sum in the middle of a step, of decodes and the second time, does not come about."""
    gather = MpiCommunicator.all_gather
    calls = iter(range(10**9))

    def all_gather(self: MpiCommunicator, out: np.ndarray, x: np.ndarray) -> None:
        if next(calls) == 22:  # of 15 in each of the five times, 5 a step
            raise MemoryError("no room for a sum")
        gather(self, out, x)

    MpiCommunicator.all_gather = all_gather  # type: ignore[method-assign]


def fail_in_a_layer() -> None:
    """A linear layer in the middle of a step raises; for the device "reference"."""
    linear = reference.linear
    calls = iter(range(10**9))

    def failing(*args: Any) -> None:
        if next(calls) == 40:  # of 27 in each of the five times, 9 a step
            raise MemoryError("no room in a layer")
        linear(*args)

    reference.linear = failing


def fail_to_load() -> None:
    """The weights cannot be read."""

    def load_parameters(*args: Any) -> dict[str, Any]:
        raise OSError("the disk is gone")

    loading.load_parameters = load_parameters  # type: ignore[assignment]


def pad_steps() -> None:
    """The device "cpu" records steps of the sizes that a GPU records."""
    CpuDevice.recorded_shape = PaddedDevice.recorded_shape  # type: ignore[method-assign,assignment]
    CpuDevice.recorded_rows = PaddedDevice.recorded_rows  # type: ignore[method-assign,assignment]


TROUBLES: dict[str, Callable[[], None]] = {
    "sum": fail_in_a_sum,
    "layer": fail_in_a_layer,
    "load": fail_to_load,
}


def survive(llm: LLM) -> Iterator[list[list[int]] | str]:
    """What three requests together come to, five times one after the other: tokens, or an error."""
    prompts = [models.history_prompt(seed)[:5] for seed in SEEDS[:3]]
    for _ in range(5):
        try:
            yield generated(llm, prompts, SamplingParams(temperature=0, max_tokens=3))
        except (RuntimeError, MemoryError) as error:
            yield f"{type(error).__name__}: {error}"


def main() -> None:
    keywords = json.loads(sys.argv[1])
    if sys.argv[2:]:
        from mpi4py import MPI

        if sys.argv[2].startswith("padded-"):
            pad_steps()
        if MPI.COMM_WORLD.Get_rank() == int(sys.argv[3]):
            TROUBLES[sys.argv[2].removeprefix("padded-")]()
    llm = LLM(**keywords)
    print(json.dumps(list(survive(llm)) if sys.argv[2:] else serve(llm)), flush=True)
    # It is not closed here: the other ranks end all the same.


if __name__ == "__main__":
    main()
