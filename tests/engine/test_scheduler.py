"""The scheduler over real tables and a model of memory: what a step reads is what its sequence wrote, whatever came between."""

from __future__ import annotations

import itertools

import pytest
from helpers.scheduling import BLOCK, World, make_request, run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minipage.cache import Group
from minipage.engine.request import Status


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
