"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence

from ..cache import Tables
from ..errors import InvalidArgumentError
from ..outputs import RequestOutput
from ..sampling_params import BeamSearchParams, SamplingParams
from ..text.tokenizer import Tokenizer
from .beam_search import BeamRequest
from .drawing import Launched, Wanted, launch, launch_ahead
from .prefix_store import PrefixStore
from .prompt import CheckedParams, Params, Prompt, PromptReader
from .request import Request, Status
from .runner import Runner
from .sampled import SampledRequest
from .scheduler import Scheduler
from .stats import Stats
from .step import Scheduled, Step
from .tracked import OnOutput, Tracked


class Engine:
    """Continuous batching over a paged KV cache.

    ``add_request`` queues, ``step`` computes one iteration for as many requests as fit, ``abort`` ends one at any moment. All
    calls may come from any thread; they take turns.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        prompts: PromptReader,
        tokenizer: Tokenizer | None,
        prefix_store: PrefixStore,
        *,
        eos_token_ids: frozenset[int],
        seed: int,
        on_close: Callable[[], None],
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._scheduler = scheduler
        self._prompts = prompts
        self._prefix_store = prefix_store
        self._seeds = random.Random(seed)
        self._tracked: dict[str, Tracked] = {}
        self._ahead: tuple[Step, Launched] | None = None  # computed, or being computed, and not accounted for yet
        self._lock = threading.RLock()
        self._is_amid_step = False
        self._to_abort: list[str] = []  #: when the step has ended
        self._on_close: Callable[[], None] | None = on_close
        self._prompt_tokens = self._generation_tokens = 0

    # ---- requests ----------------------------------------------------------------------------------------------------
    def check_params(self, params: Sequence[Params]) -> list[CheckedParams]:
        """Parameters to prepare requests with, each checked and copied once, however many requests it is for."""
        checked = {key: self._prompts.check_params(each) for key, each in {id(each): each for each in params}.items()}
        return [checked[id(each)] for each in params]

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | CheckedParams,
        *,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """A request, checked and tokenised but not queued yet. Raises InvalidArgumentError for what can never be served."""
        if not isinstance(request_id, str) or not request_id:
            raise InvalidArgumentError(
                f"request_id={request_id!r} is not allowed; it must be a string that is not empty"
            )
        if cache_salt == "" or not isinstance(cache_salt, str | None):  # "" would be the salt of all others
            raise InvalidArgumentError(
                f"cache_salt={cache_salt!r} is not allowed; it must be a string that is not empty, or None"
            )
        params, width = params if isinstance(params, CheckedParams) else self._prompts.check_params(params)
        text, token_ids = self._prompts.read(prompt)
        longest = self._prompts.longest_total(len(token_ids), width)
        seed = params.seed if isinstance(params, SamplingParams) else 0
        if seed is None:
            with self._lock:
                seed = self._seeds.getrandbits(64)
        text = text if prompt_text is None else prompt_text
        return Request(request_id, text, token_ids, params, seed, longest, cache_salt, width)

    def submit(self, request: Request, *, on_output: OnOutput | None = None, final_only: bool = False) -> None:
        """Queue a prepared request. Its outputs go to ``on_output`` if given, else to whoever calls :meth:`step`."""
        with self._lock:
            self._check_open()
            if request.request_id in self._tracked:
                raise InvalidArgumentError(f"request_id={request.request_id!r} is in use by an unfinished request")
            own = (self._scheduler, self.tokenizer, self.eos_token_ids, on_output)
            params = request.params
            if isinstance(params, BeamSearchParams):
                self._tracked[request.request_id] = BeamRequest(request, params, *own)
            else:
                self._tracked[request.request_id] = SampledRequest(request, params, *own, final_only)
            self._scheduler.add(request)
            self._prompt_tokens += request.num_prompt_tokens

    def add_request(
        self, request_id: str, prompt: Prompt, params: Params | None = None, *, cache_salt: str | None = None
    ) -> None:
        """Queue a prompt (text, or token ids). Raises InvalidArgumentError, with nothing queued, for what can never be served."""
        params = SamplingParams() if params is None else params
        self.submit(self.prepare(request_id, prompt, params, cache_salt=cache_salt))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks; returns what it had so far, None where it is not there (any more).

        Amid a step of the same thread, where a sink may call this, or the garbage collector for a stream that nobody reads, it
        ends when the step does, and nothing is returned.
        """
        with self._lock:
            if self._is_amid_step:
                self._to_abort.append(request_id)
                return None
            return self._abort(request_id)

    def _abort(self, request_id: str) -> RequestOutput | None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return None
        tracked.abort()
        self._scheduler.abort(tracked.request)
        self._generation_tokens += tracked.num_generated
        output = tracked.output(True)
        if tracked.on_output is not None:
            tracked.on_output(output)
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._tracked)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request is still in the engine."""
        return request_id in self._tracked

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step(self) -> list[RequestOutput]:
        """Compute one iteration. Returns an output for each request that got a token or ended, but for those with a sink of
        their own. Where the model fails, the requests of the step are aborted and the error is raised; the rest goes on.
        """
        with self._lock:
            self._check_open()
            try:
                self._is_amid_step = True
                return self._step()
            finally:
                self._is_amid_step = False
                while self._to_abort:
                    self._abort(self._to_abort.pop())

    def _step(self) -> list[RequestOutput]:
        step, launched = self._resume()
        if not step.scheduled:
            step, launched = self._scheduler.schedule(), None
        if not step.scheduled:
            return []
        try:
            if launched is None:
                self.runner.execute(step)
            self._scheduler.advance(step)
            touched = self._take_tokens(step) if launched is None else self._take_launched(step, launched)
        except BaseException:
            self._ahead = None
            self._scheduler.forget_swaps(step)
            for request_id in {item.request.request_id for item in step.scheduled}:
                self._abort(request_id)
            raise
        return self._collect(touched)

    def _resume(self) -> tuple[Step, Launched | None]:
        """The step that was launched ahead of its time, if any, without the sequences that have ended since."""
        step, launched = self._ahead or (Step(), None)
        self._ahead = None
        step.scheduled = [item for item in step.scheduled if not item.sequence.is_finished]
        return step, launched

    def _take_tokens(self, step: Step) -> list[Tracked]:
        """Hand out a token to whoever reached the end of what is known; returns the requests with something new."""
        touched: dict[str, Tracked] = {}
        wanted: list[Wanted] = []
        first_row = 0
        for item in step.scheduled:
            tracked = self._tracked[item.request.request_id]
            if item.request.wants_prompt_logprobs:
                self._score_prompt(tracked, item, first_row)
            last_known, first_row = first_row + item.num_known - 1, first_row + item.num_tokens
            is_wanted = item.sequence.is_computed and not item.sequence.is_finished
            if is_wanted:
                wanted.append(Wanted(tracked, item, range(last_known, first_row)))
            if is_wanted or not item.request.unfinished:
                touched[item.request.request_id] = tracked
        for launched in launch(self.runner, wanted):
            self._take(step, launched)
        return list(touched.values())

    def _take_launched(self, step: Step, launched: Launched) -> list[Tracked]:
        """The same for a step that was launched ahead."""
        touched = {item.request.request_id: self._tracked[item.request.request_id] for item in step.scheduled}
        self._take(step, launched)
        return list(touched.values())

    def _take(self, step: Step, launched: Launched) -> None:
        """Hand tokens out, while the device computes the next step if that can be launched already."""
        self._ahead = launch_ahead(self.runner, self._scheduler, launched, step)
        for drawn in launched.read(logits_are_there=self._ahead is None):
            drawn.take()

    def _score_prompt(self, tracked: Tracked, item: Scheduled, first_row: int) -> None:
        """Hand out the logits of prompt tokens, as many rows at once as there is room for."""
        positions = tracked.prompt_rows(item)
        for start in range(0, len(positions), self.runner.max_logit_rows):
            part = positions[start : start + self.runner.max_logit_rows]
            rows = [first_row + position - positions[0] for position in part]
            if item.request.unfinished:
                tracked.score_prompt(part[0], self.runner.logits(rows))

    def _collect(self, touched: list[Tracked]) -> list[RequestOutput]:
        returned = []
        for tracked in touched:
            finished = self._scheduler.remove_finished(tracked.request)
            if finished:
                del self._tracked[tracked.request.request_id]
                self._generation_tokens += tracked.num_generated
            if finished or not tracked.final_only:
                output = tracked.output(finished)
                if tracked.on_output is None:
                    returned.append(output)
                else:
                    tracked.on_output(output)
        return returned

    # ---- the whole -----------------------------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """Where the engine is, and its counters."""
        with self._lock:
            blocks, counters = self._scheduler.blocks, self._scheduler.counters
            allocator, unfinished = blocks.allocator, self._tracked.values()
            held = [block for tables in self._tables() for block in tables.blocks if block >= 0]
            return Stats(
                num_blocks=allocator.num_blocks,
                num_free_blocks=allocator.num_free_blocks,
                num_cached_blocks=allocator.num_cached_blocks,
                num_running=len(self._scheduler.running),
                num_waiting=sum(tracked.request.status is Status.WAITING for tracked in unfinished),
                num_swapped=sum(tracked.request.status is Status.SWAPPED for tracked in unfinished),
                preemptions=counters.preemptions,
                swapped_in_blocks=counters.swapped_in_blocks,
                swapped_out_blocks=counters.swapped_out_blocks,
                cow_copies=counters.copies,
                shared_block_savings=len(held) - len(set(held)),
                prefix_cache_hit_tokens=counters.hit_tokens,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generation_tokens + sum(tracked.num_generated for tracked in unfinished),
                draft_tokens=counters.draft_tokens,
                accepted_tokens=counters.accepted_tokens,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError naming the block where counts, tables and free list disagree; an idle engine holds none."""
        with self._lock:
            self._scheduler.blocks.check_integrity(self._tables())

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Write the prefix cache to a file, and return how many blocks it has; see :class:`.prefix_store.PrefixStore`."""
        with self._lock:
            self._check_open()
            return self._prefix_store.save(path)

    def load_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Add a file's blocks to the prefix cache, evicting none, and return how many fitted."""
        with self._lock:
            self._check_open()
            return self._prefix_store.load(path)

    def close(self) -> None:
        """Abort what is left and give the memory back. The engine cannot be used afterwards."""
        with self._lock:
            for request_id in list(self._tracked):
                self.abort(request_id)
            if self._on_close is not None:
                self._on_close()
                self._on_close = None

    def _tables(self) -> list[Tables]:
        return [s.tables for tracked in self._tracked.values() for s in tracked.request.sequences]

    def _check_open(self) -> None:
        if self._on_close is None:
            raise RuntimeError("this engine is closed")
