"""The scheduler over real tables and a model of memory: what a step reads is what its sequence wrote, whatever came between."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minipage.cache import BlockAllocator, PrefixCache, copy_launches
from minipage.engine.request import Request, Sequence, Status
from minipage.engine.scheduler import Scheduler, Step
from minipage.sampling_params import SamplingParams

BLOCK = 4


class Memory:
    """Slots that remember which tokens they were computed from: K and V depend on all tokens up to their own."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def copy(self, step: Step) -> None:
        for launch in copy_launches(step.copies):
            before = dict(self.slots)
            for src, dst in launch:
                for offset in range(BLOCK):
                    self.slots[dst, offset] = before.get((src, offset), ())

    def compute(self, sequence: Sequence, count: int) -> None:
        """Write the next ``count`` tokens, after checking that all before them are there."""
        for position in range(sequence.num_computed + count):
            slot = (sequence.table.blocks[position // BLOCK], position % BLOCK)
            expected = tuple(sequence.token_ids[: position + 1])
            if position < sequence.num_computed:
                assert self.slots[slot] == expected, f"position {position} of sequence {sequence.index}"
            else:
                self.slots[slot] = expected


def make_request(name: int, prompt: list[int], n: int, limit: int) -> Request:
    return Request(str(name), None, prompt, SamplingParams(n=n, max_tokens=32), 0, limit)


class World:
    """A scheduler with its memory, run a step at a time with tokens that a caller picks."""

    def __init__(self, num_blocks: int, max_seqs: int, budget: int, caching: bool) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, BLOCK) if caching else None
        self.scheduler = Scheduler(
            self.allocator, BLOCK, max_num_seqs=max_seqs, max_num_batched_tokens=budget, prefix_cache=self.cache
        )
        self.memory = Memory()
        self.budget, self.max_seqs = budget, max_seqs
        self.requests: list[Request] = []

    def add(self, name: int, prompt: list[int], n: int) -> Request | None:
        limit = self.scheduler.longest_total(len(prompt), n)
        if limit == 0 or n > self.max_seqs:
            return None
        request = make_request(name, prompt, n, min(limit, len(prompt) + 12))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, pick: itertools.cycle[int]) -> Step:
        step = self.scheduler.schedule()
        assert step.num_tokens <= self.budget
        assert sum(request.num_seqs for request in self.scheduler.running) <= self.max_seqs
        self.memory.copy(step)
        for _, sequence, count in step.scheduled:
            self.memory.compute(sequence, count)
        self.scheduler.advance(step)
        for request, sequence, _ in step.scheduled:
            if sequence.num_computed == len(sequence.token_ids):
                self._grow(request, sequence, pick)
        for request in list(self.scheduler.running):
            self.scheduler.remove_finished(request)
        return step

    def _grow(self, request: Request, sequence: Sequence, pick: itertools.cycle[int]) -> None:
        first = not request.is_forked
        if first:
            self.scheduler.fork(request)
        for each in request.sequences if first else [sequence]:
            each.token_ids.append(next(pick))
            if len(each.token_ids) >= request.max_total_tokens or next(pick) == 7:
                self.scheduler.finish(each, "length")

    def check(self) -> None:
        self.allocator.check_integrity([s.table for request in self.requests for s in request.sequences])
        if self.cache is not None:
            self.cache.check_integrity()
        order = {id(request): index for index, request in enumerate(self.requests)}
        arrivals = [order[id(request)] for request in [*self.scheduler.running, *self.scheduler.waiting]]
        assert arrivals == sorted(arrivals), "first come, first served"


class Schedules(RuleBasedStateMachine):
    """Random arrivals, steps and aborts on a small pool."""

    @initialize(
        num_blocks=st.integers(2, 14),
        max_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 5, 64]),
        caching=st.booleans(),
        seed=st.lists(st.integers(0, 8), min_size=5, max_size=17),
    )
    def start(self, num_blocks: int, max_seqs: int, budget: int, caching: bool, seed: list[int]) -> None:
        self.world = World(num_blocks, max_seqs, budget, caching)
        self.pick = itertools.cycle([*seed, 1, 2, 3])
        self.names = itertools.count()

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=18), n=st.integers(1, 4))
    def add(self, prompt: list[int], n: int) -> None:
        self.world.add(next(self.names), prompt, n)

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


@given(prompt=st.integers(1, 40), n=st.integers(1, 5), num_blocks=st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_longest_total_is_reached_alone(prompt: int, n: int, num_blocks: int) -> None:
    """A request that the pool takes reaches its longest length alone without being preempted, and no further."""
    world = World(num_blocks, n, 64, caching=False)
    longest = world.scheduler.longest_total(prompt, n)
    if longest == 0:
        assert -(-prompt // BLOCK) > num_blocks
        return
    request = make_request(0, [1] * prompt, n, longest)
    world.scheduler.add(request)
    run_all(world)
    assert {len(sequence.token_ids) for sequence in request.sequences} == {longest}
    assert world.scheduler.num_preemptions == 0
    shared = prompt // BLOCK
    assert shared + n * (-(-longest // BLOCK) - shared) > num_blocks


def test_latest_arrival_gives_way() -> None:
    """Where blocks run out, the earliest request is never preempted and the latest one is."""
    world = World(6, 4, 64, caching=False)
    first, second = world.add(0, [1] * 8, 1), world.add(1, [0] * 8, 1)
    assert first is not None and second is not None
    pick = itertools.cycle([1])
    while world.scheduler.num_preemptions == 0:
        world.step(pick)
    assert first.status is Status.RUNNING and second.status is Status.WAITING
    assert second.sequences[0].table.blocks == []
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
    assert newcomer.status is Status.WAITING and newcomer.sequences[0].table.blocks == []
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
