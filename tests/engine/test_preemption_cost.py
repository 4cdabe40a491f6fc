"""Swap or recompute: what was asked for, or what is cheaper by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.pressure import all_tables

from minipage import LLM, SamplingParams
from minipage.engine.preemption import PreemptionCost
from minipage.engine.request import Request


@pytest.fixture
def running(history: Callable[[int], Path]) -> Iterator[Request]:
    """A running request of 3 sequences that hold 8 blocks: 2 of the prompt, and 2 each."""
    with LLM(str(history(6)), device="cpu", dtype="float32", block_size=4, num_blocks=64) as llm:
        llm.engine.add_request("n", list(range(8)), SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True))
        for _ in range(9):
            llm.engine.step()
        [request] = llm.engine._scheduler.running
        assert len({block for tables in all_tables(llm) for block in tables.blocks}) == 8
        yield request


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_fixed_modes_measure_nothing(running: Request, mode: str) -> None:
    """What was asked for is done, whatever it costs."""
    cost = PreemptionCost(mode, bytes_per_block=1000)
    for seconds in (1e-6, 1e6):
        cost.computed(1000, seconds)
        cost.swapped(1000, 1 / seconds)
        assert cost.prefers_swap(running) == (mode == "swap")


def test_auto_takes_the_cheaper(running: Request) -> None:
    """Blocks once out and once in at the speed of copies, against tokens once, the prompt's once, at the speed of steps."""
    blocks, tokens = 8, 8 + 3 * 8
    for bandwidth in (1e3, 1e6, 1e9):
        break_even = tokens * bandwidth / (2 * blocks * 1000)  # tokens a second
        for factor in (0.9, 1.1):
            cost = PreemptionCost("auto", bytes_per_block=1000)
            cost.bytes_per_second = bandwidth
            cost.computed(1000, 1000 / (break_even * factor))
            assert cost.prefers_swap(running) == (factor < 1)


def test_auto_learns_from_what_it_sees(running: Request) -> None:
    """Slow copies make it recompute, slow steps make it swap, and it forgets what is long ago."""
    cost = PreemptionCost("auto", bytes_per_block=1000)
    assert cost.prefers_swap(running), "before anything is known"
    cost.computed(10_000, 1.0)
    for _ in range(100):
        cost.swapped(1, 1.0)
    assert not cost.prefers_swap(running)
    for _ in range(100):
        cost.swapped(1000, 1e-4)
    assert cost.prefers_swap(running)
