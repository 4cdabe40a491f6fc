"""Guessed tokens in a step of the scheduler: verified together, where budget and blocks are left for them."""

from __future__ import annotations

import itertools

from helpers.scheduling import World

from minipage.sampling_params import BeamSearchParams


def test_drafts_are_verified_in_one_step() -> None:
    """A sequence that repeats itself computes its last known token and the draft together, and grows by one more."""
    world = World(32, 4, 64, caching=False, num_speculative_tokens=4)
    request = world.add(0, [1] * 9, 1)
    assert request is not None
    pick = itertools.cycle([1])
    assert world.step(pick).scheduled[0].draft == ()  # the prompt
    [item] = world.step(pick).scheduled
    assert (item.num_tokens, item.num_known, item.draft) == (5, 1, (1, 1, 1, 1))
    assert len(request.sequences[0].token_ids) == 9 + 1 + 5
    counters = world.scheduler.counters
    assert (counters.draft_tokens, counters.accepted_tokens) == (4, 4)


def test_wrong_guesses_give_their_blocks_back() -> None:
    """Where nothing of a draft is right, the table holds what it would hold without it, and no block more is published."""
    world = World(32, 4, 64, caching=True, num_speculative_tokens=8)
    request = world.add(0, [1] * 11, 1)
    assert request is not None
    world.step(itertools.cycle([1]))
    free = world.allocator.num_free_blocks
    [item] = world.step(itertools.cycle([2])).scheduled
    assert len(item.draft) == min(8, request.max_total_tokens - 12 - 1)
    assert request.sequences[0].tables.num_tokens == request.sequences[0].num_computed == 12
    assert world.allocator.num_free_blocks == free == 32 - 3
    assert world.allocator.num_cached_blocks == 3
    world.check()


def test_drafts_take_what_is_left_of_the_budget() -> None:
    """Every known token goes first, those of newcomers too; guesses get the rest, the earliest arrival's first."""
    world = World(64, 4, 8, caching=False, num_speculative_tokens=8)
    pick = itertools.cycle([1])
    for name in range(2):
        world.add(name, [1] * 4, 1)
    world.step(pick)
    world.add(2, [2] * 5, 1)
    assert [(item.num_known, len(item.draft)) for item in world.step(pick).scheduled] == [(1, 1), (1, 0), (5, 0)]
    assert [(item.num_known, len(item.draft)) for item in world.step(pick).scheduled] == [(1, 5), (1, 0), (1, 0)]


def test_drafts_take_what_is_left_of_the_blocks() -> None:
    """Guesses shrink to the slots that are free, and nobody gives way for them."""
    world = World(12, 4, 64, caching=False, num_speculative_tokens=8)
    pick = itertools.cycle([1])
    world.add(0, [1] * 9, 1)
    world.add(1, [1] * 8, 1)
    world.step(pick)
    while world.allocator.num_free_blocks > 2:  # others hold all but two blocks
        world.allocator.allocate()
    # The second sequence takes one of the two for its next token, so there are 2 and 4 free slots for the first one's guesses;
    # the second one's have those of its own block.
    step = world.step(pick)
    assert [(item.num_known, len(item.draft)) for item in step.scheduled] == [(1, 6), (1, 3)]
    assert world.allocator.num_free_blocks == 0
    assert world.scheduler.counters.preemptions == 0


def test_beams_and_prompts_do_not_draft() -> None:
    """Chunks of a prompt that repeats itself have no guesses behind them, and neither have the tokens of beams."""
    world = World(32, 4, 4, caching=False, num_speculative_tokens=4)
    world.add(0, [1] * 11, 1)
    pick = itertools.cycle([1])
    assert [world.step(pick).scheduled[0].draft for _ in range(3)] == [(), (), ()]
    world = World(32, 4, 64, caching=False, num_speculative_tokens=4)
    request = world.add(0, [1] * 11, 1)
    assert request is not None
    request.params = BeamSearchParams(beam_width=1, max_tokens=8)
    assert [world.step(pick).scheduled[0].draft for _ in range(3)] == [(), (), ()]
