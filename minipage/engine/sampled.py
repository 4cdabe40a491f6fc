"""A request whose n continuations are drawn token by token, each for itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from ..outputs import CompletionOutput, FinishReason, Logprob
from ..sampling_params import SamplingParams
from ..text.stop import StopFilter
from ..text.tokenizer import Tokenizer
from .filters import Ids
from .output import PromptLogprobs, SequenceOutput
from .request import Request
from .request import Sequence as TokenSequence
from .sampler import Biases, SampledToken, SamplingError, SamplingRow, as_ids, looks_back, sample
from .scheduler import Scheduler
from .speculation import NgramIndex
from .step import Scheduled
from .tracked import OnOutput, Tracked


class SampledRequest(Tracked):
    """Draws tokens as its SamplingParams say, and ends each sequence by its own tokens and text."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        on_output: OnOutput | None,
        final_only: bool,
    ) -> None:
        super().__init__(request, scheduler, on_output, final_only)
        self._params = params
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids(params, tokenizer, eos_token_ids)
        self._eos_token_ids = eos_token_ids
        self._looks_back = looks_back(params)
        self._counts: defaultdict[int, Counter[int]] = defaultdict(Counter)  # of the ids in each output, if it does
        self._prompt_logprobs = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(request.prompt_token_ids, params.prompt_logprobs, tokenizer)

    def asks(self, item: Scheduled, unread: int = 0) -> list[SamplingRow]:
        sequence, draft = item.sequence, item.draft
        position = sequence.num_output_tokens + unread
        return [self._row(sequence.index, position + ahead, draft[:ahead]) for ahead in range(1 + len(draft))]

    @property
    def wants_logits(self) -> bool:
        return self._params.n > 1 and not self.request.is_forked  # all are drawn from one row

    def take(self, item: Scheduled, tokens: Sequence[SampledToken | SamplingError], logits: np.ndarray | None) -> None:
        if not self.request.is_forked:
            self._fork(tokens[0], logits)
        elif item.draft:
            self._verify(item, tokens)
        else:
            self._append(item.sequence, tokens[0])

    def fail(self, error: SamplingError) -> None:
        for sequence in self.request.unfinished:
            self._finish(sequence, "abort", str(error))

    def abort(self) -> None:
        for sequence in self.request.unfinished:
            self._outputs[sequence.index].finish()

    def completions(self) -> list[CompletionOutput]:
        sequences = self.request.sequences
        if not self.request.is_forked:  # it ended before its first token: all n ended as the one that there was
            sequences = sequences * self._params.n
        return [output.take(sequence) for output, sequence in zip(self._outputs, sequences, strict=True)]

    # ---- the prompt --------------------------------------------------------------------------------------------------
    def prompt_rows(self, item: Scheduled) -> range:
        if self._prompt_logprobs is None:
            return range(0)
        stop = item.sequence.num_computed
        return range(stop - item.num_known, min(stop, self.request.num_prompt_tokens - 1))

    def score_prompt(self, position: int, logits: np.ndarray) -> None:
        assert self._prompt_logprobs is not None
        error = self._prompt_logprobs.score(position + 1, logits)
        if error is not None:
            self.fail(error)

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        return None if self._prompt_logprobs is None else self._prompt_logprobs.entries()

    # ---- a token -----------------------------------------------------------------------------------------------------
    def _row(self, index: int, position: int, draft: Sequence[int] = ()) -> SamplingRow:
        """What the sampler needs to know for token ``position`` of sequence ``index``, if ``draft`` comes before it."""
        row = SamplingRow(self._params, self.request.seed, index, position, biases=self._biases)
        if position < self._params.min_tokens:
            row = row._replace(banned=self._banned_at_first)
        if self._looks_back:
            counts = self._counts[index] + Counter(draft) if draft else self._counts[index]
            row = row._replace(prompt_ids=self._prompt_ids, output_counts=counts)
        return row

    # Made when a row first needs them, and so not for those that wait.
    @cached_property
    def _banned_at_first(self) -> Ids:
        return as_ids(self._eos_token_ids.union(self._stop_ids))

    @cached_property
    def _biases(self) -> Biases:
        return Biases.of(self._params)

    @cached_property
    def _prompt_ids(self) -> Ids:
        return np.unique(as_ids(self.request.prompt_token_ids))

    def _fork(self, token: SampledToken | SamplingError, logits: np.ndarray | None) -> None:
        """The prompt is computed: the others go on from it, sharing its blocks until they write, with tokens of their own."""
        first = self.request.sequences[0]
        others = range(1, self._params.n)
        self.request.sequences += [self.scheduler.fork(first, index) for index in others]
        if others:
            prompt = NgramIndex()
            for sequence in self.request.sequences:
                sequence.ngrams = NgramIndex(prompt, self.request.num_prompt_tokens)
        self.request.is_forked = True
        tokens = [token]
        if others:
            assert logits is not None
            rows = [self._row(i, 0) for i in others]
            tokens += sample(np.broadcast_to(logits, (len(others), logits.shape[1])), rows)
        for sequence, each in zip(self.request.unfinished, tokens, strict=True):
            self._append(sequence, each)

    def _verify(self, item: Scheduled, tokens: Sequence[SampledToken | SamplingError]) -> None:
        """Take token after token; those behind a draft's token are of use only as long as it is the one that was drawn."""
        sequence = item.sequence
        for token, guess in zip(tokens, (*item.draft, None), strict=True):
            self._append(sequence, token)
            if sequence.is_finished or sequence.token_ids[-1] != guess:
                break
            self.scheduler.accept(item)
        self.scheduler.drop_draft(item)

    @cached_property
    def _outputs(self) -> list[SequenceOutput]:
        """Made when the first is needed: of many that wait, each would take memory and time for nothing."""
        params = self._params
        stop = _stop_filter(tuple(params.stop or ()), params.include_stop_str_in_output)
        return [SequenceOutput(self._tokenizer, self.request, params, index, stop.fresh()) for index in range(params.n)]

    def _append(self, sequence: TokenSequence, token: SampledToken | SamplingError) -> None:
        """Append a token to a sequence, and end the sequence where the token says so; the request, where there is none."""
        if sequence.is_finished:  # another one has failed
            return
        if isinstance(token, SamplingError):
            self.fail(token)
            return
        params = self._params
        sequence.token_ids.append(token.token_id)
        if self._looks_back:
            self._counts[sequence.index][token.token_id] += 1
        self.num_generated += 1
        ends = token.token_id in self._stop_ids
        may_stop = sequence.num_output_tokens >= params.min_tokens
        stop = self._outputs[sequence.index].push(token, is_stop_token=ends, may_stop=may_stop)
        if ends or stop is not None:
            self._finish(sequence, "stop", self._stop_ids[token.token_id] if ends else stop)
        elif self.request.most_to_come(sequence) == 0:
            self._finish(sequence, "length", None)

    def _finish(self, sequence: TokenSequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        late = self._outputs[sequence.index].finish()
        if late is not None and reason == "length":
            reason, stop_reason = "stop", late
        self.scheduler.finish(sequence, reason, stop_reason)


@lru_cache(4)
def _stop_filter(stops: tuple[str, ...], include_stop: bool) -> StopFilter:
    """A filter to make others from: requests that come together have the same stops as a rule."""
    return StopFilter(stops, include_stop)


def stop_ids(
    params: SamplingParams, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
) -> dict[int, int | str | None]:
    """Tokens that end a sequence, with the stop_reason of each: EOS ids, stop_token_ids, and stop strings that are special
    tokens, shown or not.
    """
    ids: dict[int, int | str | None] = {} if params.ignore_eos else dict.fromkeys(eos_token_ids)
    for stop in params.stop or ():
        token_id = None if tokenizer is None else tokenizer.special_id(stop)
        if token_id is not None:
            ids[token_id] = stop
    ids.update((token_id, token_id) for token_id in params.stop_token_ids or ())
    return ids
