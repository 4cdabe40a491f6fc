"""Iteration-level scheduling (Orca; PagedAttention, section 4.5): what each step computes, and who gives way when blocks run out.

First come, first served. A request's computed tokens catch up with its known tokens within a budget a step, so prompts in chunks
and decodes of others share steps. Where blocks run out, the latest arrival is preempted: it gives all its blocks back and is
computed again from its tokens when there is room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cache import BlockAllocator, BlockCopy, BlockTable, OutOfBlocks, PrefixCache
from ..outputs import FinishReason
from .request import Request, Sequence, Status


class Scheduled(NamedTuple):
    """``num_tokens`` tokens of a sequence from ``sequence.num_computed`` on."""

    request: Request
    sequence: Sequence
    num_tokens: int


@dataclass
class Step:
    """What one step computes; ``copies`` are made before anything is written."""

    scheduled: list[Scheduled] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.num_tokens for item in self.scheduled)


class Scheduler:
    """Decides steps over a pool of blocks. It knows no arrays: it moves block ids and counts tokens."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefix_cache = prefix_cache
        self.waiting: deque[Request] = deque()  # by arrival: preempted ones return to the front
        self.running: list[Request] = []  # by arrival
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_copies = 0

    # ---- requests come and go ------------------------------------------------------------------------------------------
    def longest_total(self, num_prompt_tokens: int, n: int) -> int:
        """The most tokens, prompt and output, that each of ``n`` sequences of a prompt can reach alone in the pool.

        Whole blocks of the prompt are shared; the last token of a sequence needs no slot, since nothing follows it. 0 where not
        even the prompt fits.
        """
        size, pool = self._block_size, self._allocator.num_blocks
        shared = num_prompt_tokens // size
        own = (pool - shared) // n
        longest = (shared + own) * size + 1
        if longest > num_prompt_tokens:
            return longest
        return num_prompt_tokens + 1 if -(-num_prompt_tokens // size) <= pool else 0

    def add(self, request: Request) -> None:
        """Queue a request, which :meth:`longest_total` says can fit."""
        table = BlockTable(self._allocator, self._block_size)
        request.sequences = [Sequence(0, list(request.prompt_token_ids), request.num_prompt_tokens, table)]
        self.waiting.append(request)

    def fork(self, request: Request) -> None:
        """Give a request whose prompt is computed its n sequences; they share its blocks until they write."""
        first = request.sequences[0]
        for index in range(1, request.params.n):
            sequence = Sequence(index, list(request.prompt_token_ids), request.num_prompt_tokens, first.table.fork())
            sequence.num_computed = first.num_computed
            request.sequences.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence of a running request: its blocks are free at once, those that are cached stay so until needed."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.table.free()

    def abort(self, request: Request) -> None:
        """End all of a request, wherever it is."""
        for sequence in request.unfinished:
            self.finish(sequence, "abort")
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        request.status = Status.FINISHED

    def remove_finished(self, request: Request) -> bool:
        """Take a running request out if all its sequences have ended; says whether it did."""
        if request.unfinished:
            return False
        self.running.remove(request)
        request.status = Status.FINISHED
        return True

    # ---- a step --------------------------------------------------------------------------------------------------------
    def schedule(self) -> Step:
        """The next step. Running requests come first; new ones are admitted only where nobody had to give way."""
        step = Step()
        for request in list(self.running):
            if request.status is Status.RUNNING:  # an earlier one may have preempted it meanwhile
                self._schedule_running(request, step)
        if not step.num_preempted:
            self._admit(step)
        self.num_copies += len(step.copies)
        return step

    def advance(self, step: Step) -> None:
        """Note that a step was computed, and publish the blocks that it filled."""
        for _, sequence, num_tokens in step.scheduled:
            sequence.num_computed += num_tokens
            if self._prefix_cache is not None:
                self._prefix_cache.publish(sequence.table, sequence.token_ids, sequence.num_computed)

    def _schedule_running(self, request: Request, step: Step) -> None:
        """Claim slots for what is known of all the request's sequences, preempting from the back until there is room."""
        copies: list[BlockCopy] = []
        while True:
            try:
                for sequence in self._resume_forks(request):
                    missing = self._claimable(request, sequence) - sequence.table.num_tokens
                    copies += sequence.table.append(missing)
                break
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim)
                step.num_preempted += 1
                if victim is request:
                    return
        step.copies += copies
        self._schedule_tokens(request, step)

    def _schedule_tokens(self, request: Request, step: Step) -> None:
        budget = self._max_num_batched_tokens - step.num_tokens
        for sequence in request.unfinished:
            num_tokens = min(sequence.table.num_tokens - sequence.num_computed, budget)
            if num_tokens > 0:
                step.scheduled.append(Scheduled(request, sequence, num_tokens))
                budget -= num_tokens

    def _claimable(self, request: Request, sequence: Sequence) -> int:
        """Tokens to hold slots for: all known ones, but only the prompt while others have yet to be forked from it."""
        alone = len(request.unfinished) == 1 or sequence.num_computed >= request.num_prompt_tokens
        return len(sequence.token_ids) if alone else request.num_prompt_tokens

    def _resume_forks(self, request: Request) -> list[Sequence]:
        """The sequences that can go on; after a preemption the others follow once the first has computed the prompt again."""
        leader, *others = request.unfinished
        if leader.num_computed < request.num_prompt_tokens:
            return [leader]
        for sequence in others:
            if sequence.table.num_tokens == 0:
                sequence.table = leader.table.fork(request.num_prompt_tokens)
                sequence.num_computed = request.num_prompt_tokens
        return [leader, *others]

    def _admit(self, step: Step) -> None:
        num_seqs = sum(request.num_seqs for request in self.running)
        while self.waiting and step.num_tokens < self._max_num_batched_tokens:
            request = self.waiting[0]
            num_seqs += request.num_seqs
            if num_seqs > self._max_num_seqs or not self._claim_known(request):
                return
            self.waiting.popleft()
            request.status, request.was_admitted = Status.RUNNING, True
            self.running.append(request)
            self._schedule_tokens(request, step)

    def _claim_known(self, request: Request) -> bool:
        """Claim slots for the known tokens of a waiting request, cached blocks among them, or change nothing and say False."""
        leader = request.unfinished[0]
        hits = self._match(request, leader)
        # A block to spare for each running sequence: a newcomer should not be preempted by the very next step.
        headroom = sum(len(other.unfinished) for other in self.running)
        if not self._allocator.can_hold(self._blocks_known(request) + headroom, hits):
            return False
        leader.table.adopt([self._allocator.fork(block) for block in hits])
        leader.num_computed = leader.table.num_tokens
        leader.table.append(self._claimable(request, leader) - leader.table.num_tokens)
        if not request.was_admitted:
            request.num_cached_tokens = leader.num_computed
        self.num_hit_tokens += leader.num_computed
        return True

    def _match(self, request: Request, leader: Sequence) -> list[int]:
        # Prompt logprobs need the logits of every prompt token, so all of them are computed.
        if self._prefix_cache is None or request.params.prompt_logprobs is not None:
            return []
        # The last known token is always computed, since its logits are wanted; of several sequences only the prompt is shared.
        most = self._claimable(request, leader) - 1
        return self._prefix_cache.match(leader.token_ids, most)

    def _blocks_known(self, request: Request) -> int:
        """Blocks that hold all known tokens of a request, those of its prompt once."""
        size = self._block_size
        shared = request.num_prompt_tokens // size
        return shared + sum(-(-len(sequence.token_ids) // size) - shared for sequence in request.unfinished)

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a running request back (recompute: its tokens are what it resumes from)."""
        for sequence in request.unfinished:
            sequence.table.free()
            sequence.num_computed = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.status = Status.WAITING
        self.num_preemptions += 1
