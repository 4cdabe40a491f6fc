"""Iteration-level scheduling (Orca; PagedAttention, section 4.5): what each step computes, and who gives way without room.

First come, first served. A request's computed tokens catch up with its known tokens within a budget a step, so prompts in
chunks and decodes of others share steps. Where blocks run out, the latest arrival is preempted: its blocks go to the host pool
and come back later (swap), or it is computed again from its tokens (recompute).

What is then left of the budget and the blocks goes to speculation: sequences compute guesses at their next tokens in the same
step. Those that prove right count; the slots of the others are given back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ..cache import BlockManager
from ..outputs import FinishReason
from ..sampling_params import BeamSearchParams, SamplingParams
from .request import Request, Sequence, Status
from .step import Counters, Scheduled, Step


class Scheduler:
    """Decides steps over the blocks of a manager. It knows no arrays: it moves block ids and counts tokens."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        prefers_swap: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        """``num_speculative_tokens`` are guessed at most for a sequence and step. ``prefers_swap`` says whether a request to be
        preempted is better swapped than recomputed.
        """
        self.blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_speculative_tokens = num_speculative_tokens
        self._prefers_swap = prefers_swap
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # by arrival: preempted ones return to the front
        self.running: list[Request] = []  # by arrival
        self.counters = Counters()
        #: The one that was not admitted, and what supply would do for it.
        self._refused: tuple[Request, int] | None = None

    # ---- requests come and go ----------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request, which ``blocks.longest_total`` says can fit."""
        tables = self.blocks.new_tables()
        request.sequences = [Sequence(0, list(request.prompt_token_ids), request.num_prompt_tokens, tables)]
        self.waiting[request] = None

    def fork(self, source: Sequence, index: int) -> Sequence:
        """A sequence that goes on from all that ``source`` has computed; they share its blocks until they write."""
        known = source.token_ids[: source.num_computed]
        tables = self.blocks.fork(source.tables)
        return Sequence(index, known, source.num_prompt_tokens, tables, source.num_computed)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence: its blocks are free at once, those that are cached stay so until they are needed."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.blocks.free(sequence.tables)

    def abort(self, request: Request) -> None:
        """End all of a request, wherever it is."""
        for sequence in request.unfinished:
            self.finish(sequence, "abort")
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            del self.waiting[request]
        request.status = Status.FINISHED

    def remove_finished(self, request: Request) -> bool:
        """Take a running request out if all its sequences have ended; says whether it did."""
        if request.unfinished:
            return False
        self.running.remove(request)
        request.status = Status.FINISHED
        return True

    # ---- a step ------------------------------------------------------------------------------------------------------
    def schedule(self) -> Step:
        """The next step. Running requests come first; others are admitted only where nobody had to give way."""
        step = Step()
        for request in list(self.running):
            if request.status is Status.RUNNING:  # an earlier one may have preempted it meanwhile
                self._schedule_running(request, step)
        if not step.preempted:
            self._admit(step)
        if self._num_speculative_tokens:
            self._draft(step)
        self.counters.copies += len(step.copies)
        self.counters.swapped_in_blocks += len(step.swaps_in)
        self.counters.swapped_out_blocks += len(step.swaps_out)
        return step

    def schedule_ahead(self, step: Step) -> Step | None:
        """The step after one of decodes whose tokens are drawn and not known here yet: one more for each of its sequences.

        None, with nothing changed, where that is not all there is to do or cannot be told without the tokens: others wait or
        are amid their prompts, a sequence is to get its last token or none, blocks are short. ``step`` is advanced already.
        """
        num_running = sum(len(request.unfinished) for request in self.running)
        if self.waiting or len(step.scheduled) != num_running or not all(map(_goes_on, step.scheduled)):
            return None
        if not self.blocks.can_append([(item.sequence.tables, 1) for item in step.scheduled]):
            return None
        ahead = Step()
        for item in step.scheduled:
            self._claim(item.request, [(item.sequence, 1)], ahead)  # no copies: the last block is its own by now
        return ahead

    def advance(self, step: Step) -> None:
        """Note that a step was computed: publish the blocks that it filled, release those that windows left behind.

        Drafts do not count yet; each has to be verified (:meth:`accept`, :meth:`drop_draft`) before the next step.
        """
        for item in step.scheduled:
            self._computed(item, item.num_known)

    def _computed(self, item: Scheduled, num_tokens: int) -> None:
        sequence = item.sequence
        sequence.num_computed += num_tokens
        self.blocks.computed(sequence.tables, sequence.token_ids, sequence.num_computed, item.request.cache_salt)

    def forget_swaps(self, step: Step) -> None:
        """A step failed, its swaps made or not: those it was to swap out are computed again."""
        for request in step.preempted:
            if request.status is Status.SWAPPED:
                self._take_back(request)

    def _schedule_running(self, request: Request, step: Step) -> None:
        """Claim slots for the request's next tokens, preempting from the back until there is room; all of them or none."""
        wanted = self._wanted(request, self._max_num_batched_tokens - step.num_tokens)
        while not self.blocks.can_append([(sequence.tables, count) for sequence, count in wanted]):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return
        self._claim(request, wanted, step)

    def _wanted(self, request: Request, budget: int) -> list[tuple[Sequence, int]]:
        """The sequences that have tokens to compute, with as many as the budget and the windows' pools allow."""
        wanted = []
        longest = self.blocks.longest_chunk or budget
        for sequence in self._resume_forks(request):
            known = len(sequence.token_ids) if self._may_pass_prompt(request, sequence) else request.num_prompt_tokens
            count = min(known - sequence.num_computed, budget, longest)
            if count > 0:
                wanted.append((sequence, count))
                budget -= count
        return wanted

    def _claim(self, request: Request, wanted: list[tuple[Sequence, int]], step: Step) -> None:
        for sequence, count in wanted:
            step.copies += self.blocks.append(sequence.tables, count)
            step.scheduled.append(Scheduled(request, sequence, count))
            step.num_tokens += count

    @staticmethod
    def _may_pass_prompt(request: Request, sequence: Sequence) -> bool:
        """Not while others have yet to be forked from what it has of the prompt."""
        return sequence.num_computed >= request.num_prompt_tokens or len(request.unfinished) == 1

    def _resume_forks(self, request: Request) -> list[Sequence]:
        """The sequences that can go on; after a recompute the others follow once the first has computed the prompt again."""
        leader, *others = request.unfinished
        if leader.num_computed < request.num_prompt_tokens:
            return [leader]
        for sequence in others:
            if sequence.num_computed == 0:
                sequence.tables = self.blocks.fork(leader.tables)
                sequence.num_computed = request.num_prompt_tokens
        return [leader, *others]

    # ---- speculation -------------------------------------------------------------------------------------------------
    def _draft(self, step: Step) -> None:
        """Let sequences that will know what to draw from compute guesses too. All others have what they need by now."""
        for index, item in enumerate(step.scheduled):
            most = min(self._most_guesses(item), self._max_num_batched_tokens - step.num_tokens)
            draft = item.sequence.ngrams.propose(item.sequence.token_ids, most) if most > 0 else ()
            while draft and not self.blocks.can_append([(item.sequence.tables, len(draft))]):
                draft = draft[:-1]
            if draft:
                self.blocks.append(item.sequence.tables, len(draft))  # no copies: the last block is its own by now
                step.scheduled[index] = item._replace(num_tokens=item.num_tokens + len(draft), draft=draft)
                step.num_tokens += len(draft)
                self.counters.draft_tokens += len(draft)

    def _most_guesses(self, item: Scheduled) -> int:
        """None before the last known token, for beams, and before the first token, which is drawn for all n at once.

        The last token of a sequence is not guessed, since nothing comes after it.
        """
        request, sequence = item.request, item.sequence
        is_last = sequence.num_computed + item.num_tokens == len(sequence.token_ids)
        if not (is_last and request.is_forked) or isinstance(request.params, BeamSearchParams):
            return 0
        return min(self._num_speculative_tokens, request.most_to_come(sequence) - 1)

    def accept(self, item: Scheduled) -> None:
        """The next token of an item's draft was drawn, and the sequence goes on: what was computed of it counts."""
        self._computed(item, 1)
        self.counters.accepted_tokens += 1

    def drop_draft(self, item: Scheduled) -> None:
        """Give back what was claimed for the tokens of an item's draft that were not accepted."""
        if not item.sequence.is_finished:  # it holds nothing any more
            self.blocks.truncate(item.sequence.tables, item.sequence.num_computed)

    # ---- admission ---------------------------------------------------------------------------------------------------
    def _admit(self, step: Step) -> None:
        num_seqs = sum(request.num_seqs for request in self.running)
        promised: int | None = None  # to those running; summed up once, where somebody may come in
        while self.waiting and step.num_tokens < self._max_num_batched_tokens:
            request = next(iter(self.waiting))
            num_seqs += request.num_seqs
            if num_seqs > self._max_num_seqs:
                return
            if promised is None:
                promised = sum(map(self._blocks_to_come, self.running))
            supply = self.blocks.supply - promised
            if self._refused is not None and self._refused[0] is request and supply < self._refused[1]:
                return  # to look for the hits of a long prompt in each step would take time from those that run
            room = self._blocks_known(request) + promised
            is_swapped = request.status is Status.SWAPPED
            missing = self._swap_in(request, room, step) if is_swapped else self._begin(request, room)
            if missing > 0:
                self._refused = (request, supply + missing)
                return
            self._refused = None
            self.waiting.popitem(last=False)
            request.status = Status.RUNNING
            self.running.append(request)
            promised += self._blocks_to_come(request)
            wanted = self._wanted(request, self._max_num_batched_tokens - step.num_tokens)
            self._claim(request, wanted, step)

    def _begin(self, request: Request, room: int) -> int:
        """Give a waiting request what is cached of it, if there are ``room`` blocks; else change nothing, and say how many are
        missing."""
        leader = request.unfinished[0]
        hits = self._match(request, leader)
        missing = self.blocks.shortage(room, hits)
        if missing > 0:
            return missing
        self.blocks.adopt(leader.tables, hits)
        leader.num_computed = leader.tables.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = leader.num_computed
        self.counters.hit_tokens += leader.num_computed
        return 0

    def _match(self, request: Request, leader: Sequence) -> list[list[int]]:
        # Prompt logprobs need the logits of every prompt token, so all of them are computed. The last known token always is,
        # since its logits are wanted; of several sequences only the prompt is shared.
        known = len(leader.token_ids) if self._may_pass_prompt(request, leader) else request.num_prompt_tokens
        most = 0 if request.wants_prompt_logprobs else known - 1
        return self.blocks.match(leader.token_ids, most, request.cache_salt)

    def _swap_in(self, request: Request, room: int, step: Step) -> int:
        """Bring a swapped request's blocks back, if there are ``room`` blocks; else say how many are missing."""
        missing = self.blocks.shortage(room, self.blocks.no_hits())
        if missing > 0:
            return missing
        step.swaps_in += self.blocks.swap_in([sequence.tables for sequence in request.unfinished])
        return 0

    def _blocks_known(self, request: Request) -> int:
        """Blocks for all known tokens of a request that is to be admitted."""
        lengths = [len(sequence.token_ids) for sequence in request.unfinished]
        return self.blocks.blocks_known(request.num_prompt_tokens, lengths)

    def _blocks_to_come(self, request: Request) -> int:
        """Blocks that a running request is about to take: for what is left of its known tokens, and one a sequence.

        They stay free when others are admitted: a newcomer should not be preempted by the very next steps.
        """
        size = self.blocks.block_size
        remaining = sum((len(s.token_ids) - s.num_computed) // size + 1 for s in request.unfinished)
        return remaining * len(self.blocks.groups)

    # ---- preemption --------------------------------------------------------------------------------------------------
    def _preempt(self, request: Request, step: Step) -> None:
        """Take all blocks of a running request back: to the host pool, or for nothing, to be computed again."""
        swaps = None
        if self._prefers_swap(request):
            swaps = self.blocks.swap_out([sequence.tables for sequence in request.unfinished])
        if swaps is None:
            self._take_back(request)
        else:
            request.status = Status.SWAPPED
            step.swaps_out += swaps
        self.running.remove(request)
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)
        step.preempted.append(request)
        self.counters.preemptions += 1

    def _take_back(self, request: Request) -> None:
        for sequence in request.unfinished:
            self.blocks.free(sequence.tables)
            sequence.num_computed = 0
        request.status = Status.WAITING


def _goes_on(item: Scheduled) -> bool:
    """Whether the sequence of a decode, whose token is not known yet, has one to come after it unless that token ends it."""
    request, sequence = item.request, item.sequence
    draws = request.is_forked and isinstance(request.params, SamplingParams) and not item.draft
    return draws and sequence.is_computed and request.most_to_come(sequence) > 1
