"""Steps of decodes where the host draws: their logits are computed along with them, and others when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.checks import greedy_params
from helpers.models import history_prompt

from minipage import LLM
from minipage.kernels.cpu.team import Program, Team

SEED = 5


@pytest.fixture
def llm(history: Callable[[int], Path]) -> Iterator[LLM]:
    """With two sequences that decode, in steps of at most 8 tokens."""
    with LLM(str(history(SEED)), device="cpu", block_size=4, num_blocks=32, max_num_batched_tokens=8) as llm:
        for name, seed in (("a", 1), ("b", 2)):
            llm.engine.add_request(name, history_prompt(seed), greedy_params(12))
        while len([out for out in llm.engine.step() if out.outputs[0].token_ids]) < 2:
            pass
        llm.engine.step()
        yield llm


def test_a_step_of_decodes_is_one_program(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The team's threads are woken once."""
    programs: list[Program] = []
    run = Team._run_program

    def counted(team: Team, program: Program) -> None:
        programs.append(program)
        run(team, program)

    monkeypatch.setattr(Team, "_run_program", counted)
    llm.engine.step()
    assert len(programs) == 1


def test_rows_that_are_asked_for_later_are_those_of_the_step(llm: LLM) -> None:
    """Whichever rows and in whichever order: computing some replaces those that were there."""
    runner = llm.engine.runner
    both = runner.logits([0, 1]).copy()
    np.testing.assert_array_equal(runner.logits([0]), both[:1])
    np.testing.assert_array_equal(runner.logits([1]), both[1:])
    np.testing.assert_array_equal(runner.logits([0]), both[:1])
    np.testing.assert_array_equal(runner.logits([1, 0]), both[::-1])
    np.testing.assert_array_equal(runner.logits([0, 1]), both)


def test_rows_beside_a_prompt_are_not_those_of_the_step_before(llm: LLM) -> None:
    """The logits of a step that computes part of a prompt as well are computed when they are asked for."""
    before = llm.engine.runner.logits([0, 1]).copy()
    llm.engine.add_request("c", history_prompt(3), greedy_params(12))
    llm.engine.step()
    after = llm.engine.runner.logits([0, 1])
    assert (after != before).any(axis=1).all()
