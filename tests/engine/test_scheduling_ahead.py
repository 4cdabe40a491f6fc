"""Steps that are scheduled before the tokens of the step before are known: decodes alone, and nobody is the worse for it."""

from __future__ import annotations

import itertools

from helpers.scheduling import World, run_all

from minipage.engine.request import Status
from minipage.sampling_params import BeamSearchParams


def test_decodes_are_scheduled_ahead_of_their_tokens() -> None:
    """Where all that runs decodes, each step but the first is computed before the tokens of the one before are known."""
    world = World(32, 4, 64, caching=True, ahead=True)
    requests = [world.add(name, [name] * 7, 2) for name in range(2)]
    steps = run_all(world)
    assert world.num_ahead == steps - 2  # not the one after the prompts, whose sequences are forked, nor the first
    assert all(len(s.token_ids) == 19 for request in requests if request for s in request.sequences)


def test_nothing_is_scheduled_ahead_of_others() -> None:
    """While somebody waits or computes a prompt, where blocks are short, and where a sequence ends: nothing changes."""
    world = World(5, 2, 4, caching=False, ahead=True)
    first, second = world.add(0, [1] * 3, 1), world.add(1, [0] * 9, 1)
    assert first is not None and second is not None
    pick = itertools.cycle([1])
    world.step(pick)
    while second.sequences[0].num_computed < 9:  # in chunks
        world.step(pick)
        assert world.launched is None
    world.step(pick)
    while world.launched is not None:
        world.step(pick)
    assert world.allocator.num_free_blocks == 0
    run_all(world)
    assert world.scheduler.counters.preemptions > 0


def test_who_comes_is_not_kept_waiting_by_steps_ahead() -> None:
    """A newcomer is scheduled as soon as the step that was computed already is accounted for."""
    world = World(32, 4, 64, caching=False, ahead=True)
    pick = itertools.cycle([1])
    world.add(0, [1] * 3, 1)
    for _ in range(3):
        world.step(pick)
    assert world.launched is not None
    newcomer = world.add(1, [2] * 3, 1)
    assert newcomer is not None
    world.step(pick)
    assert world.launched is None
    world.step(pick)
    assert newcomer.sequences[0].num_computed == 3


def test_blocks_that_suffice_for_some_are_not_taken_ahead() -> None:
    """Two sequences want a block each and one is free: nobody gets it before it is known who gives way."""
    world = World(3, 2, 64, caching=False, ahead=True)
    requests = [world.add(name, [name] * 3, 1) for name in range(2)]
    pick = itertools.cycle([1])
    world.step(pick)
    world.step(pick)
    assert all(request is not None and request.status is Status.RUNNING for request in requests)
    assert world.launched is None and world.allocator.num_free_blocks == 1
    world.check()
    run_all(world)


def test_beams_are_not_scheduled_ahead() -> None:
    """What goes on, and from where, is told by logits."""
    world = World(32, 4, 64, caching=False, ahead=True)
    request = world.add(0, [1] * 3, 1)
    assert request is not None
    request.params = BeamSearchParams(beam_width=1, max_tokens=12)
    assert run_all(world) > 10 and world.num_ahead == 0
