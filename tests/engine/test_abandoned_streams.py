"""A stream that nobody reads any more ends wherever the garbage collector closes it, amid a step of others too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import models
from helpers.checks import TIGHT, assert_idle_and_whole, generate_ids, greedy_params, run_to_end
from helpers.moments import at_call

from minipage import LLM

SEED = 5
PROMPTS = [models.history_prompt(seed, 9) for seed in (1, 2, 3)]


def abandon_stream(llm: LLM) -> None:
    """Leaves a running stream in a cycle, as a traceback that is kept does."""
    cycle: list[Any] = [llm.stream(PROMPTS[2], greedy_params(16))]
    next(cycle[0])
    cycle.append(cycle)


def test_abandoned_streams_end_without_harm(history: Callable[[int], Path]) -> None:
    """Wherever it is collected, no block is lost, and requests beside it say what they should."""
    settings: dict[str, Any] = {**TIGHT, "max_num_batched_tokens": 12, "speculative": "ngram"}
    with LLM(str(history(SEED)), device="cpu", dtype="float32", **settings) as llm:
        alone = generate_ids(llm, PROMPTS[:2], greedy_params(10))
        gc.disable()
        try:
            number, is_collected = 1, True
            while is_collected:
                abandon_stream(llm)
                for name, prompt in zip("ab", PROMPTS, strict=False):
                    llm.engine.add_request(name, prompt, greedy_params(10))
                with at_call(number, gc.collect) as calls:
                    outs = run_to_end(llm)
                assert [outs[name].outputs[0].token_ids for name in "ab"] == alone
                is_collected = calls[0] == number
                number += 13
                gc.collect()
                assert_idle_and_whole(llm)
        finally:
            gc.enable()
        assert number > 1000
