"""Ctrl-C at any moment of ``generate`` and ``stream``: it raises KeyboardInterrupt, and the engine goes on whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import models
from helpers.checks import TIGHT, Canary, assert_clean, assert_idle_and_whole, generate_ids, greedy_params, run_to_end
from helpers.moments import at_call

from minipage import LLM, SamplingParams
from minipage.interrupts import CatchInterrupt, DelayInterrupt

SEED = 5
PROMPTS = [models.history_prompt(seed, 9) for seed in (1, 2, 3)]
PARAMS = [SamplingParams(n=2, seed=1, max_tokens=12), greedy_params(16), greedy_params(8, prompt_logprobs=1)]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_ctrl_c_leaves_nothing_behind(
    history: Callable[[int], Path], canary: Callable[[int], Canary], streamed: bool
) -> None:
    """Wherever it comes, no request, block or place in the host pool is lost, and a request of somebody else goes on."""
    settings: dict[str, Any] = {**TIGHT, "max_num_batched_tokens": 6, "preemption_mode": "swap", "swap_space": "1MiB"}
    with LLM(str(history(SEED)), device="cpu", dtype="float32", speculative="ngram", **settings) as llm:
        [alone] = generate_ids(llm, PROMPTS[:1], greedy_params(10))

        def work() -> None:
            if streamed:
                list(llm.stream(PROMPTS[0], PARAMS[0]))
            else:
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)

        with at_call(-1, press_ctrl_c) as calls:
            work()
        host = llm.engine._scheduler.blocks.host
        assert host is not None
        interrupted = 0
        for number in range(1, calls[0], max(1, calls[0] // 150)):
            llm.engine.add_request("mate", PROMPTS[0], greedy_params(10))
            try:
                with at_call(number, press_ctrl_c):
                    work()
            except KeyboardInterrupt:
                interrupted += 1
            llm.check_integrity()
            outs = run_to_end(llm)
            assert set(outs) <= {"mate"}
            assert all(out.outputs[0].token_ids == alone for out in outs.values())
            assert host.num_free_blocks == host.num_blocks
            assert_idle_and_whole(llm)
        assert interrupted > 100
        assert_clean(llm, canary(SEED))


def test_what_is_delayed() -> None:
    """Ctrl-C raises when the context ends, the second one at once; both contexts leave the handler as it was."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), DelayInterrupt() as ctrl_c:
        press_ctrl_c()
        assert ctrl_c.interrupted
    reached = []
    with pytest.raises(KeyboardInterrupt), DelayInterrupt():
        press_ctrl_c()
        reached.append(1)
        press_ctrl_c()
        reached.append(2)
    assert reached == [1]
    with CatchInterrupt() as outer, DelayInterrupt() as inner:  # who catches it already is asked
        press_ctrl_c()
    assert (outer.interrupted, inner.interrupted) == (True, False)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_and_handlers_are_left_alone() -> None:
    """A thread may not touch signals, and who has a handler of their own keeps it."""
    caught: list[int] = []
    thread = threading.Thread(
        target=lambda: DelayInterrupt().__enter__().__exit__(None, None, None) or caught.append(0)
    )
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        with DelayInterrupt():
            press_ctrl_c()
        assert caught == [0, signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
