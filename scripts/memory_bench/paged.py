"""minipage's own memory: its scheduler and its block manager, as they are in the engine, without a model."""

from __future__ import annotations

from minipage.cache import BlockManager
from minipage.engine.request import Request, Sequence
from minipage.engine.scheduler import Scheduler
from minipage.sampling_params import SamplingParams

from .replay import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Iteration, Usage
from .trace import TraceRequest


class PagedSystem:
    """Takes the place of the engine around a scheduler: every token that is drawn is token 0."""

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        n: int = 1,
        caching: bool = False,
        swap: bool = False,
    ) -> None:
        """``n`` sequences are drawn for each request. With ``swap``, a host pool of the same size takes what is preempted."""
        num_blocks = num_slots // block_size
        self._blocks = BlockManager(num_blocks, block_size, caching=caching, num_host_blocks=num_blocks if swap else 0)
        self.scheduler = Scheduler(
            self._blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            prefers_swap=lambda request: swap,
        )
        self._n = n
        self._num_slots = num_slots
        self._traced: dict[Request, TraceRequest] = {}
        self.num_cached_tokens = 0  #: of the prompts of finished requests, found in the prefix cache when they came

    def can_hold(self, request: TraceRequest) -> bool:
        """Whether the pool is large enough for a request alone."""
        longest = self._blocks.longest_total(request.num_prompt_tokens, self._n)
        return longest is None or request.num_tokens <= longest

    def add(self, request: TraceRequest) -> None:
        made = Request(
            request_id="traced",
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            params=SamplingParams(n=self._n, max_tokens=request.num_output_tokens),
            seed=0,
            max_total_tokens=request.num_tokens,
            width=self._n,
        )
        self._traced[made] = request
        self.scheduler.add(made)

    def step(self) -> Iteration | None:
        step = self.scheduler.schedule()
        if not step.scheduled:
            return None
        self.scheduler.advance(step)
        usage = self._usage()
        context = sum(item.sequence.num_computed for item in step.scheduled)
        for item in step.scheduled:
            if item.sequence.is_computed:
                self._grow(item.request, item.sequence)
        finished = [request for request in self.scheduler.running if not request.unfinished]
        for request in finished:
            self.scheduler.remove_finished(request)
            self.num_cached_tokens += request.num_cached_tokens or 0
        num_swapped = len(step.swaps_out) + len(step.swaps_in)
        return Iteration(step.num_tokens, context, num_swapped, usage, [self._traced.pop(each) for each in finished])

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def _usage(self) -> Usage:
        allocator, size = self._blocks.allocator, self._blocks.block_size
        unfinished = [sequence for request in self.scheduler.running for sequence in request.unfinished]
        useful = sum(sequence.num_computed for sequence in unfinished)
        entries = sum(len(sequence.tables.tables[0].blocks) for sequence in unfinished)
        held = allocator.num_blocks - allocator.num_free_blocks
        # Blocks that are shared hold tokens for several: entries, not blocks, are what these tokens would fill.
        internal = entries * size - useful
        return Usage(
            useful=useful,
            reserved=0,
            internal=internal,
            external=self._num_slots - held * size,
            running=len(self.scheduler.running),
            table_entries=entries,
            held_blocks=held,
        )

    def _grow(self, request: Request, sequence: Sequence) -> None:
        """Draw a token for a sequence that has computed all it knows; after the prompt, one for each of n sequences."""
        grown = [sequence]
        if not request.is_forked:
            request.sequences += [self.scheduler.fork(sequence, index) for index in range(1, self._n)]
            request.is_forked = True
            grown = request.sequences
        for each in grown:
            each.token_ids.append(0)
            if len(each.token_ids) == request.max_total_tokens:
                self.scheduler.finish(each, "length")
