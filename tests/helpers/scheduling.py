"""A scheduler run without a model: over real tables, and a memory that remembers what each slot was computed from."""

from __future__ import annotations

import itertools
from typing import Any

from minipage.cache import RELEASED, BlockManager, Group, copy_launches
from minipage.engine.request import Request, Sequence, Status
from minipage.engine.scheduler import Scheduler
from minipage.engine.step import Scheduled, Step
from minipage.sampling_params import SamplingParams

BLOCK = 4


class Memory:
    """Slots that remember which tokens they were computed from: K and V depend on all tokens up to their own."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.device: dict[int, dict[int, Any]] = {}  # block -> offset -> what was computed there
        self.host: dict[int, dict[int, Any]] = {}

    def move(self, step: Step) -> None:
        """Swaps out, swaps in, copies: in the order that a runner makes them."""
        self.host |= {dst: dict(self.device.get(src, {})) for src, dst in step.swaps_out}
        self.device |= {dst: dict(self.host.get(src, {})) for src, dst in step.swaps_in}
        for launch in copy_launches(step.copies):
            self.device |= {dst: dict(self.device.get(src, {})) for src, dst in launch}

    def compute(self, item: Scheduled, drawn: list[int] | None = None) -> None:
        """Write an item's tokens, after checking that all that they see are there; a shared block is not written.

        ``drawn`` are its tokens where the scheduler does not know them yet.
        """
        allocator = self.blocks.allocator
        request, sequence = item.request, item.sequence
        first, stop = sequence.num_computed, sequence.num_computed + item.num_tokens
        token_ids = sequence.token_ids[:first] + (item.token_ids if drawn is None else drawn)
        assert len(token_ids) == stop < request.max_total_tokens
        for index, (group, table) in enumerate(zip(self.blocks.groups, sequence.tables.tables, strict=True)):
            for position in range(stop):
                block, offset = table.blocks[position // BLOCK], position % BLOCK
                content = (index, request.cache_salt, tuple(token_ids[: position + 1]))
                if position >= first:
                    assert allocator.ref_count(block) == 1 and not allocator.is_cached(block)
                    self.device.setdefault(block, {})[offset] = content
                elif position < group.sinks or position >= group.first_seen(first):
                    assert self.device[block][offset] == content, f"position {position} of sequence {sequence.index}"


def make_request(name: int, prompt: list[int], n: int, limit: int) -> Request:
    return Request(str(name), None, prompt, SamplingParams(n=n, max_tokens=32), 0, limit, None, n)


class CheckedScheduler(Scheduler):
    """One that lets nobody wait who has room, whatever it remembers of having refused it (windows may hide room for a while)."""

    def _admit(self, step: Step) -> None:
        super()._admit(step)
        if any(group.window for group in self.blocks.groups):
            return
        num_seqs = sum(request.num_seqs for request in self.running)
        for head in itertools.islice(self.waiting, 1):
            if step.num_tokens < self._max_num_batched_tokens and num_seqs + head.num_seqs <= self._max_num_seqs:
                room = self._blocks_known(head) + sum(map(self._blocks_to_come, self.running))
                is_swapped = head.status is Status.SWAPPED
                hits = self.blocks.no_hits() if is_swapped else self._match(head, head.unfinished[0])
                assert self.blocks.shortage(room, hits) > 0, f"request {head.request_id} has room and waits"


class World:
    """A scheduler with its memory, run a step at a time with tokens that a caller picks."""

    def __init__(
        self,
        num_blocks: int,
        max_seqs: int,
        budget: int,
        caching: bool,
        groups: tuple[Group, ...] = (Group(),),
        host_blocks: int = 0,
        num_speculative_tokens: int = 0,
        ahead: bool = False,
    ) -> None:
        """``ahead`` computes steps of decodes, where it can be, before the tokens of the steps before them are known."""
        self.blocks = BlockManager(num_blocks, BLOCK, groups, caching=caching, num_host_blocks=host_blocks)
        self.allocator = self.blocks.allocator
        self.scheduler = CheckedScheduler(
            self.blocks,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            num_speculative_tokens=num_speculative_tokens,
            prefers_swap=lambda request: host_blocks > 0,
        )
        self.memory = Memory(self.blocks)
        self.budget, self.max_seqs, self.ahead = budget, max_seqs, ahead
        self.requests: list[Request] = []
        self.launched: Step | None = None  # computed, its tokens not taken yet
        self.num_ahead = 0
        self._drawn: dict[tuple[Sequence, int], int] = {}

    def add(self, name: int, prompt: list[int], n: int, salt: str | None = None) -> Request | None:
        limit = self.blocks.longest_total(len(prompt), n)
        if limit == 0 or n > self.max_seqs:
            return None
        request = make_request(name, prompt, n, min(limit or 1000, len(prompt) + 12))
        request.cache_salt = salt
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, pick: itertools.cycle[int]) -> Step:
        step, self.launched = self.launched or Step(), None
        step.scheduled = [item for item in step.scheduled if not item.sequence.is_finished]  # not aborted since
        if not step.scheduled:
            step = self.scheduler.schedule()
            self._compute(step, pick)
        self.scheduler.advance(step)
        if self.ahead and step.scheduled:
            self.launched = self.scheduler.schedule_ahead(step)
            if self.launched is not None:
                self.num_ahead += 1
                for item in self.launched.scheduled:
                    assert item.sequence.is_computed and item.num_tokens == 1, "it begins with a token that is drawn"
                assert not self.launched.copies, "the last step has written into its sequences' last blocks"
                self._compute(self.launched, pick)
        for item in step.scheduled:
            if item.sequence.is_computed:
                self._grow(item, pick)
        for request in list(self.scheduler.running):
            self.scheduler.remove_finished(request)
        return step

    def _compute(self, step: Step, pick: itertools.cycle[int]) -> None:
        assert step.num_tokens <= self.budget
        assert sum(request.num_seqs for request in self.scheduler.running) <= self.max_seqs
        self.memory.move(step)
        for item in step.scheduled:
            sequence = item.sequence
            is_known = sequence.num_computed < len(sequence.token_ids)
            self.memory.compute(item, None if is_known else [self._draw(sequence, sequence.num_computed, pick)])

    def _draw(self, sequence: Sequence, position: int, pick: itertools.cycle[int]) -> int:
        """The token at a position of a sequence, the same each time it is asked for."""
        if (sequence, position) not in self._drawn:
            self._drawn[sequence, position] = next(pick)
        return self._drawn[sequence, position]

    def _grow(self, item: Scheduled, pick: itertools.cycle[int]) -> None:
        request, sequence = item.request, item.sequence
        if not request.is_forked:
            request.sequences += [self.scheduler.fork(sequence, index) for index in range(1, request.width)]
            request.is_forked = True
            for each in request.sequences:
                self._append(request, each, pick)
            return
        for guess in (*item.draft, None):
            self._append(request, sequence, pick)
            if sequence.is_finished or sequence.token_ids[-1] != guess:
                break
            self.scheduler.accept(item)
        if item.draft:
            self.scheduler.drop_draft(item)

    def _append(self, request: Request, sequence: Sequence, pick: itertools.cycle[int]) -> None:
        sequence.token_ids.append(self._draw(sequence, len(sequence.token_ids), pick))
        if len(sequence.token_ids) >= request.max_total_tokens or next(pick) == 7:
            self.scheduler.finish(sequence, "length")

    def check(self) -> None:
        sequences = [sequence for request in self.requests for sequence in request.sequences]
        tables = [sequence.tables for sequence in sequences]
        self.blocks.check_integrity(tables)
        for sequence in sequences:
            if sequence.tables.blocks:
                ahead = self.launched is not None and any(item.sequence is sequence for item in self.launched.scheduled)
                assert sequence.tables.num_tokens == sequence.num_computed + ahead, "only what is computed keeps slots"
        for group, table in ((g, t) for each in tables for g, t in zip(self.blocks.groups, each.tables, strict=True)):
            if group.window:
                held = sum(block != RELEASED for block in table.blocks)
                assert held <= -(-group.window // BLOCK) + 1 + -(-group.sinks // BLOCK)
        order = {id(request): index for index, request in enumerate(self.requests)}
        arrivals = [order[id(request)] for request in [*self.scheduler.running, *self.scheduler.waiting]]
        assert arrivals == sorted(arrivals), "first come, first served"


def run_all(world: World, limit: int = 500) -> int:
    """Steps until all is finished."""
    pick = itertools.cycle([1])
    for steps in range(limit):
        if not (world.scheduler.running or world.scheduler.waiting):
            return steps
        world.step(pick)
    raise AssertionError(f"not finished after {limit} steps")
