"""What tests of the engine share: requests, the squeeze that forces preemption, the check that nothing is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from minipage import LLM, SamplingParams
    from minipage.outputs import CompletionOutput, RequestOutput

#: A pool that four requests of TIGHT_PROMPT_LENGTH + TIGHT_MAX_TOKENS tokens outgrow: each needs 8 of its 12 blocks.
TIGHT: Mapping[str, int] = {"block_size": 4, "num_blocks": 12}
TIGHT_PROMPT_LENGTH = 9
TIGHT_MAX_TOKENS = 24


class Canary(NamedTuple):
    """A prompt whose greedy continuation is known beforehand."""

    prompt: Sequence[int]
    token_ids: Sequence[int]


def greedy_params(max_tokens: int, **changes: Any) -> SamplingParams:
    """Greedy sampling that only ``max_tokens`` ends."""
    from minipage import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **changes})


def generate_ids(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    """The token ids of each prompt's first output."""
    outs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


def assert_idle_and_whole(llm: LLM) -> None:
    """Nothing runs or waits, every block is free again, and counts, tables and free list agree."""
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert not llm.engine.has_unfinished_requests()
    llm.check_integrity()


def assert_clean(llm: LLM, canary: Canary) -> None:
    """CLEAN: the engine is idle and whole, and still says what it should to a prompt that it has nothing to do with."""
    assert_idle_and_whole(llm)
    assert generate_ids(llm, [canary.prompt], greedy_params(len(canary.token_ids))) == [list(canary.token_ids)]
    assert_idle_and_whole(llm)


def logprob_matrix(rows: Sequence[Mapping[int, Any] | None], vocab_size: int) -> npt.NDArray[np.float64]:
    """Log probabilities [n, V] from ``logprobs`` or ``prompt_logprobs`` that hold the whole vocabulary."""
    matrix = np.full((len(rows), vocab_size), np.nan)
    for i, row in enumerate(rows):
        assert row is not None
        for token_id, logprob in row.items():
            matrix[i, token_id] = logprob.logprob
    return matrix


class Result(NamedTuple):
    """Everything about a finished output that must not depend on company."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[tuple[tuple[int, float, int], ...], ...]  #: (id, logprob, rank) of each position, by id
    cumulative_logprob: float | None
    finish_reason: str | None


def result(output: CompletionOutput) -> Result:
    """The comparable part of an output; equal floats here are equal bit for bit."""
    rows = output.logprobs or []
    return Result(
        tuple(output.token_ids),
        output.text,
        tuple(tuple((i, p.logprob, p.rank) for i, p in sorted(row.items())) for row in rows),
        output.cumulative_logprob,
        output.finish_reason,
    )


def run_to_end(llm: LLM, max_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of each request by its id."""
    last: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not llm.engine.has_unfinished_requests():
            return last
        for out in llm.engine.step():
            last[out.request_id] = out
    raise AssertionError(f"requests are unfinished after {max_steps} steps: {llm.stats()}")
