"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..cache import BlockAllocator, BlockTable
from ..errors import InvalidArgumentError
from ..outputs import FinishReason, RequestOutput
from ..sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer
from .output import PromptLogprobs, SequenceOutput
from .prompt import Prompt, PromptReader
from .request import Request, Sequence
from .runner import Runner
from .sampler import SampledToken, SamplingError, SamplingRow, sample
from .scheduler import Scheduled, Scheduler, Step
from .stats import Stats

OnOutput = Callable[[RequestOutput], None]


@dataclass(eq=False)
class _Entry:
    """A request in the engine, with what its caller sees of it."""

    request: Request
    outputs: list[SequenceOutput]
    prompt_logprobs: PromptLogprobs | None
    stop_ids: dict[int, int | str | None]  #: tokens that end a sequence, and the stop_reason of each
    on_output: OnOutput | None
    final_only: bool


class Engine:
    """Continuous batching over a paged KV cache.

    ``add_request`` queues, ``step`` computes one iteration for as many requests as fit, ``abort`` ends one at any moment. All
    calls may come from any thread; they take turns.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        allocator: BlockAllocator,
        prompts: PromptReader,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: frozenset[int],
        seed: int,
        on_close: Callable[[], None],
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._scheduler = scheduler
        self._allocator = allocator
        self._prompts = prompts
        self._seeds = random.Random(seed)
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self._on_close: Callable[[], None] | None = on_close
        self._prompt_tokens = self._generation_tokens = 0

    # ---- requests ------------------------------------------------------------------------------------------------------
    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, prompt_text: str | None = None
    ) -> Request:
        """A request, checked and tokenised but not queued yet. Raises InvalidArgumentError for what can never be served."""
        if not isinstance(request_id, str) or not request_id:
            raise InvalidArgumentError(
                f"request_id={request_id!r} is not allowed; it must be a string that is not empty"
            )
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"sampling params must be SamplingParams, not {type(params).__name__}")
        params = params.clone()  # what the caller does to its own from here on changes nothing
        text, token_ids = self._prompts.read(prompt, params)
        longest = self._prompts.longest_total(len(token_ids), params.n)
        with self._lock:
            seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        return Request(request_id, text if prompt_text is None else prompt_text, token_ids, params, seed, longest)

    def submit(self, request: Request, *, on_output: OnOutput | None = None, final_only: bool = False) -> None:
        """Queue a prepared request. Its outputs go to ``on_output`` if given, else to whoever calls :meth:`step`."""
        with self._lock:
            self._check_open()
            if request.request_id in self._entries:
                raise InvalidArgumentError(f"request_id={request.request_id!r} is in use by an unfinished request")
            wanted = request.params.prompt_logprobs
            logprobs = None if wanted is None else PromptLogprobs(request.prompt_token_ids, wanted, self.tokenizer)
            outputs = [SequenceOutput(self.tokenizer, request, index) for index in range(request.params.n)]
            stop_ids = self._stop_ids(request.params)
            self._entries[request.request_id] = _Entry(request, outputs, logprobs, stop_ids, on_output, final_only)
            self._scheduler.add(request)
            self._prompt_tokens += request.num_prompt_tokens

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a prompt (text, or token ids). Raises InvalidArgumentError, with nothing queued, for what can never be served."""
        self.submit(self.prepare(request_id, prompt, params or SamplingParams()))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks; returns what it had so far, None where it is not there (any more)."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return None
            return self._abort(entry)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._entries)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request is still in the engine."""
        return request_id in self._entries

    # ---- a step --------------------------------------------------------------------------------------------------------
    def step(self) -> list[RequestOutput]:
        """Compute one iteration. Returns an output for each request that got a token or ended, but for those with a sink of
        their own. Where the model fails, the requests of the step are aborted and the error is raised; the rest goes on.
        """
        with self._lock:
            self._check_open()
            step = self._scheduler.schedule()
            if not step.scheduled:
                return []
            try:
                self.runner.execute(step)
                self._scheduler.advance(step)
                touched = self._sample(step)
            except BaseException:
                for request_id in {item.request.request_id for item in step.scheduled}:
                    self.abort(request_id)
                raise
            return self._collect(touched)

    def _sample(self, step: Step) -> list[_Entry]:
        """Draw a token for each sequence that reached its last known one; returns the requests that have something new."""
        touched: dict[str, _Entry] = {}
        targets: list[tuple[_Entry, int]] = []
        rows: list[int] = []
        first_row = 0
        for item in step.scheduled:
            entry = self._entries[item.request.request_id]
            if entry.prompt_logprobs is not None:
                self._score_prompt(entry.prompt_logprobs, entry, item, first_row)
            first_row += item.num_tokens
            children = self._reached(item)
            targets += [(entry, child) for child in children]
            rows += [first_row - 1] * len(children)
            if children or not item.request.unfinished:
                touched[item.request.request_id] = entry
        most = self.runner.max_logit_rows
        for start in range(0, len(rows), most):
            part = targets[start : start + most]
            logits = self.runner.logits(rows[start : start + most])
            drawn = sample(logits, [self._sampling_row(entry, child) for entry, child in part])
            for (entry, child), token in zip(part, drawn, strict=True):
                self._accept(entry, child, token)
        return list(touched.values())

    def _score_prompt(self, logprobs: PromptLogprobs, entry: _Entry, item: Scheduled, first_row: int) -> None:
        """Logprobs of the prompt tokens that follow the ones computed in this step."""
        stop = min(item.sequence.num_computed, item.request.num_prompt_tokens - 1)
        start = item.sequence.num_computed - item.num_tokens
        for position in range(start, stop, self.runner.max_logit_rows):
            count = min(self.runner.max_logit_rows, stop - position)
            first = first_row + position - start
            error = logprobs.score(position + 1, self.runner.logits(list(range(first, first + count))))
            if error is not None:
                self._fail(entry, error)
                return

    @staticmethod
    def _reached(item: Scheduled) -> range | list[int]:
        """Children to draw a token for: all n where the prompt was just computed for the first time."""
        if item.sequence.num_computed < len(item.sequence.token_ids):
            return []
        return [item.sequence.index] if item.request.is_forked else range(item.request.params.n)

    def _sampling_row(self, entry: _Entry, child: int) -> SamplingRow:
        request, params = entry.request, entry.request.params
        output = request.sequences[child].output_token_ids if request.is_forked else []
        banned = self.eos_token_ids.union(entry.stop_ids) if len(output) < params.min_tokens else frozenset[int]()
        return SamplingRow(params, request.seed, child, len(output), request.prompt_token_ids, output, banned)

    def _accept(self, entry: _Entry, child: int, token: SampledToken | SamplingError) -> None:
        """Append a token to child's sequence, and end the sequence where the token says so."""
        request = entry.request
        if isinstance(token, SamplingError):
            self._fail(entry, token)
            return
        if not request.unfinished:  # it has failed
            return
        self._fork(request)
        sequence = request.sequences[child]
        sequence.token_ids.append(token.token_id)
        self._generation_tokens += 1
        ends = token.token_id in entry.stop_ids
        may_stop = sequence.num_output_tokens >= request.params.min_tokens
        stop = entry.outputs[child].push(token, is_stop_token=ends, may_stop=may_stop)
        if ends or stop is not None:
            self._finish(entry, sequence, "stop", entry.stop_ids[token.token_id] if ends else stop)
        elif (
            sequence.num_output_tokens == request.params.max_tokens
            or len(sequence.token_ids) == request.max_total_tokens
        ):
            self._finish(entry, sequence, "length", None)

    def _stop_ids(self, params: SamplingParams) -> dict[int, int | str | None]:
        """Tokens that end a sequence: EOS ids, stop_token_ids, and stop strings that are special tokens, shown or not."""
        stop_ids: dict[int, int | str | None] = {} if params.ignore_eos else dict.fromkeys(self.eos_token_ids)
        for stop in params.stop or ():
            token_id = None if self.tokenizer is None else self.tokenizer.special_id(stop)
            if token_id is not None:
                stop_ids[token_id] = stop
        stop_ids.update((token_id, token_id) for token_id in params.stop_token_ids or ())
        return stop_ids

    def _fork(self, request: Request) -> None:
        """Give a request all its n sequences: from here on, and in its outputs, each has an end of its own."""
        if not request.is_forked:
            self._scheduler.fork(request)

    def _fail(self, entry: _Entry, error: SamplingError) -> None:
        """End a request whose logits are of no use; the others go on."""
        self._fork(entry.request)
        for sequence in entry.request.unfinished:
            self._finish(entry, sequence, "abort", str(error))

    def _finish(self, entry: _Entry, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        late = entry.outputs[sequence.index].finish()
        if late is not None and reason == "length":
            reason, stop_reason = "stop", late
        self._scheduler.finish(sequence, reason, stop_reason)

    # ---- outputs -------------------------------------------------------------------------------------------------------
    def _collect(self, touched: list[_Entry]) -> list[RequestOutput]:
        returned = []
        for entry in touched:
            finished = self._scheduler.remove_finished(entry.request)
            if finished:
                del self._entries[entry.request.request_id]
            if finished or not entry.final_only:
                output = self._output(entry, finished)
                if entry.on_output is None:
                    returned.append(output)
                else:
                    entry.on_output(output)
        return returned

    def _abort(self, entry: _Entry) -> RequestOutput:
        self._fork(entry.request)
        for sequence in entry.request.unfinished:
            entry.outputs[sequence.index].finish()
        self._scheduler.abort(entry.request)
        del self._entries[entry.request.request_id]
        output = self._output(entry, True)
        if entry.on_output is not None:
            entry.on_output(output)
        return output

    def _output(self, entry: _Entry, finished: bool) -> RequestOutput:
        request = entry.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=None if entry.prompt_logprobs is None else entry.prompt_logprobs.entries(),
            outputs=[entry.outputs[sequence.index].take(sequence) for sequence in request.sequences],
            finished=finished,
        )

    # ---- the whole -----------------------------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """Where the engine is, and its counters."""
        with self._lock:
            tables = [table.blocks for table in self._tables()]
            return Stats(
                num_blocks=self._allocator.num_blocks,
                num_free_blocks=self._allocator.num_free_blocks,
                num_cached_blocks=self._allocator.num_cached_blocks,
                num_running=len(self._scheduler.running),
                num_waiting=len(self._scheduler.waiting),
                preemptions=self._scheduler.num_preemptions,
                cow_copies=self._scheduler.num_copies,
                shared_block_savings=sum(map(len, tables)) - len({block for table in tables for block in table}),
                prefix_cache_hit_tokens=self._scheduler.num_hit_tokens,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generation_tokens,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError naming the block where counts, tables and free list disagree; an idle engine holds none."""
        with self._lock:
            self._allocator.check_integrity(self._tables())

    def close(self) -> None:
        """Abort what is left and give the memory back. The engine cannot be used afterwards."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._abort(entry)
            if self._on_close is not None:
                self._on_close()
                self._on_close = None

    def _tables(self) -> list[BlockTable]:
        requests = [entry.request for entry in self._entries.values()]
        return [sequence.table for request in requests for sequence in request.sequences]

    def _check_open(self) -> None:
        if self._on_close is None:
            raise RuntimeError("this engine is closed")
