"""The scheduler over real tables and a model of memory: what a step reads is what its sequence wrote, whatever came between."""

from __future__ import annotations

import itertools

import pytest
from helpers.scheduling import BLOCK, World, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minipage.cache import Group
from minipage.engine.request import Status
from minipage.sampling_params import BeamSearchParams


class Schedules(RuleBasedStateMachine):
    """Random arrivals, steps and aborts on a small pool."""

    @initialize(
        num_blocks=st.integers(2, 14),
        max_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 5, 64]),
        caching=st.booleans(),
        groups=st.sampled_from([(Group(),), (Group(5),), (Group(), Group(7)), (Group(4, 3), Group(4, 3), Group())]),
        host_blocks=st.sampled_from([0, 4, 20]),
        num_speculative_tokens=st.sampled_from([0, 1, 4, 8]),
        ahead=st.booleans(),
        seed=st.lists(st.integers(0, 8), min_size=5, max_size=17),
    )
    def start(
        self,
        num_blocks: int,
        max_seqs: int,
        budget: int,
        caching: bool,
        groups: tuple[Group, ...],
        host_blocks: int,
        num_speculative_tokens: int,
        ahead: bool,
        seed: list[int],
    ) -> None:
        num_blocks *= len(groups)
        self.world = World(num_blocks, max_seqs, budget, caching, groups, host_blocks, num_speculative_tokens, ahead)
        self.pick = itertools.cycle([*seed, 1, 2, 3])
        self.names = itertools.count()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=18),
        n=st.integers(1, 4),
        salt=st.sampled_from([None, None, "other"]),
    )
    def add(self, prompt: list[int], n: int, salt: str | None) -> None:
        self.world.add(next(self.names), prompt, n, salt)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            step = self.world.step(self.pick)
            busy = self.world.scheduler.running or self.world.scheduler.waiting
            assert step.scheduled or not busy, "something runs whenever there is something to run"

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        unfinished = [request for request in self.world.requests if request.status is not Status.FINISHED]
        if unfinished:
            self.world.scheduler.abort(unfinished[which % len(unfinished)])

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for _ in range(3000):
                if not (self.world.scheduler.running or self.world.scheduler.waiting):
                    break
                self.world.step(self.pick)
            assert not self.world.scheduler.running and not self.world.scheduler.waiting, "every request finishes"
            assert self.world.allocator.num_free_blocks == self.world.allocator.num_blocks
            host = self.world.blocks.host
            assert host is None or host.num_free_blocks == host.num_blocks


Schedules.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestSchedules = Schedules.TestCase


def run_all(world: World, limit: int = 500) -> int:
    """Steps until all is finished."""
    pick = itertools.cycle([1])
    for steps in range(limit):
        if not (world.scheduler.running or world.scheduler.waiting):
            return steps
        world.step(pick)
    raise AssertionError(f"not finished after {limit} steps")


@given(
    prompt=st.integers(1, 40), n=st.integers(1, 5), num_blocks=st.integers(1, 16), guesses=st.sampled_from([0, 3, 8])
)
@settings(max_examples=200, deadline=None)
def test_longest_total_is_reached_alone(prompt: int, n: int, num_blocks: int, guesses: int) -> None:
    """A request that the pool takes reaches its longest length alone without being preempted, and no further."""
    world = World(num_blocks, n, 64, caching=False, num_speculative_tokens=guesses)
    longest = world.blocks.longest_total(prompt, n)
    assert longest is not None
    if longest == 0:
        assert -(-prompt // BLOCK) > num_blocks
        return
    request = make_request(0, [1] * prompt, n, longest)
    world.scheduler.add(request)
    run_all(world)
    assert {len(sequence.token_ids) for sequence in request.sequences} == {longest}
    assert world.scheduler.counters.preemptions == 0
    shared = prompt // BLOCK
    assert shared + n * (-(-longest // BLOCK) - shared) > num_blocks


def test_latest_arrival_gives_way() -> None:
    """Where blocks run out, the earliest request is never preempted and the latest one is."""
    world = World(6, 4, 64, caching=False)
    first, second = world.add(0, [1] * 8, 1), world.add(1, [0] * 8, 1)
    assert first is not None and second is not None
    pick = itertools.cycle([1])
    while world.scheduler.counters.preemptions == 0:
        world.step(pick)
    assert first.status is Status.RUNNING and second.status is Status.WAITING
    assert second.sequences[0].tables.blocks == []
    run_all(world)
    assert len(second.sequences[0].token_ids) == second.max_total_tokens


def test_decode_and_prefill_share_a_step() -> None:
    """A long prompt is computed in chunks beside the decodes of those before it."""
    world = World(32, 4, 5, caching=False)
    world.add(0, [1, 2, 3], 1)
    pick = itertools.cycle([1])
    world.step(pick)
    world.add(1, [1] * 11, 1)
    assert [item.num_tokens for item in world.step(pick).scheduled] == [1, 4]
    assert [item.num_tokens for item in world.step(pick).scheduled] == [1, 4]
    assert [item.num_tokens for item in world.step(pick).scheduled] == [1, 3]
    assert [item.num_tokens for item in world.step(pick).scheduled] == [1, 1]


def test_cached_blocks_are_not_counted_twice() -> None:
    """Hits in the free list are not room for new blocks: the newcomer waits, and nothing has changed meanwhile."""
    world = World(6, 4, 64, caching=True)
    pick = itertools.cycle([1])
    prompt = list(range(16))
    done = make_request(0, prompt, 1, 17)
    world.scheduler.add(done)
    world.requests.append(done)
    world.step(pick)
    assert done.status is Status.FINISHED and world.allocator.num_cached_blocks == 4
    world.add(1, [3] * 5, 1)
    world.step(pick)
    newcomer = world.add(2, [*prompt, 1, 2, 3, 4, 5], 1)
    assert newcomer is not None
    before = world.allocator.num_free_blocks
    world.step(pick)
    assert newcomer.status is Status.WAITING and newcomer.sequences[0].tables.blocks == []
    assert world.allocator.num_free_blocks == before
    run_all(world)
    assert newcomer.status is Status.FINISHED


@pytest.mark.parametrize("n", [1, 3])
def test_cached_prefix_is_not_computed_again(n: int) -> None:
    """A prompt seen before is computed from its last block on; at least its last token is."""
    world = World(16, 4, 64, caching=True)
    world.add(0, [1] * 12, 1)
    run_all(world)
    again = world.add(1, [1] * 12, n)
    assert again is not None
    assert world.step(itertools.cycle([1])).num_tokens == 4
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("num_blocks", [5, 6])
def test_newcomers_leave_room_for_each_other(num_blocks: int) -> None:
    """Who was admitted in the same step counts as running: what it is about to take is kept free of the next one."""
    world = World(num_blocks, 4, 64, caching=False)
    first, second = world.add(0, [1] * 8, 1), world.add(1, [2] * 4, 1)
    assert first is not None and second is not None
    world.step(itertools.cycle([1]))
    assert first.status is Status.RUNNING
    # The first one has 2 blocks and 3 are kept for it (its 8 tokens are not computed yet); the second one wants 1.
    assert second.status is (Status.RUNNING if num_blocks == 6 else Status.WAITING)


# ---- ahead -------------------------------------------------------------------------------------------------------------


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


# ---- speculation -------------------------------------------------------------------------------------------------------


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
