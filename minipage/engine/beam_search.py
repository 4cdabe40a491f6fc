"""Beam search over shared blocks (PagedAttention, section 4.4): candidates fork and drop tables, K and V stay where they are.

Each live beam is a sequence. Once all of them have their logits, the best continuations become the next beams: a beam with
several children is forked, one without any gives its blocks back. Only where two beams write into the same block is it copied.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..outputs import CompletionOutput, FinishReason, Logprob
from ..sampling_params import BeamSearchParams, SamplingParams
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .output import logprob_dict
from .request import Request
from .request import Sequence as TokenSequence
from .sampler import SampledToken, SamplingError, SamplingRow, prompt_logprobs
from .scheduler import Scheduler
from .step import Scheduled
from .tracked import OnOutput, Tracked

Candidates = tuple[tuple[int, float, int], ...]  #: (token id, logprob, rank), the most likely first

_MOST_LIKELY = SamplingRow(SamplingParams(temperature=0), seed=0, child=0, position=0)


@dataclass
class Beam:
    """A live hypothesis: a sequence, the sum of its logprobs, and the tokens' own entries."""

    sequence: TokenSequence
    logprob: float
    steps: tuple[SampledToken, ...]
    candidates: Candidates | None = None  #: continuations, once its logits are there


@dataclass
class Hypothesis:
    """A finished continuation."""

    score: float
    logprob: float
    steps: tuple[SampledToken, ...]
    reason: FinishReason


class BeamRequest(Tracked):
    """Keeps ``beam_width`` live beams and the best finished hypotheses, scored as in transformers' beam search."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        on_output: OnOutput | None,
    ) -> None:
        super().__init__(request, scheduler, on_output, final_only=True)
        self._params = params
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
        self._beams: list[Beam] = []
        self._finished: list[Hypothesis] = []
        self._error: str | None = None

    def asks(self, item: Scheduled, unread: int = 0) -> list[SamplingRow]:
        return [_MOST_LIKELY]

    @property
    def wants_logits(self) -> bool:
        return True

    def take(self, item: Scheduled, tokens: Sequence[SampledToken | SamplingError], logits: np.ndarray | None) -> None:
        assert logits is not None
        if isinstance(tokens[0], SamplingError):
            self.fail(tokens[0])
            return
        if not self._beams:
            self._beams = [Beam(self.request.sequences[0], 0.0, ())]
        enough = min(self._params.beam_width + len(self._eos_token_ids), logits.shape[1])
        best = prompt_logprobs(logits, [tokens[0].token_id], enough)[0]
        assert isinstance(best, SampledToken)
        beam = next(beam for beam in self._beams if beam.sequence is item.sequence)
        beam.candidates = tuple(entry for entry in best.top if math.isfinite(entry[1]))
        # A budget may spread the beams over steps, and a preemption in between sets those back that had their logits.
        if all(beam.candidates is not None and beam.sequence.is_computed for beam in self._beams):
            self._select()

    def fail(self, error: SamplingError) -> None:
        self._error = str(error)
        self._end("abort")

    def abort(self) -> None:
        self._beams = []

    def completions(self) -> list[CompletionOutput]:
        """The best hypotheses first; where the request was aborted, what had finished by then."""
        hypotheses = self._finished[: self._params.n]
        if not hypotheses and all(sequence.is_finished for sequence in self.request.sequences):
            hypotheses = [Hypothesis(-np.inf, 0.0, (), "abort")]
        return [self._completion(index, hypothesis) for index, hypothesis in enumerate(hypotheses)]

    # ---- a step of the search ----------------------------------------------------------------------------------------
    def _select(self) -> None:
        """Of the continuations of all beams, those that end become hypotheses if among the best W, the best W others beams.

        (1 + number of EOS ids) * W of them are enough: no more than those can be in the way of the W-th that goes on.
        """
        width = self._params.beam_width
        enough = width * (1 + len(self._eos_token_ids))
        pool = [
            (-(beam.logprob + logprob), order, token_id, logprob, rank)
            for order, beam in enumerate(self._beams)
            for token_id, logprob, rank in beam.candidates or ()
        ]
        chosen: list[tuple[Beam, float, SampledToken]] = []
        for place, (negative, order, token_id, logprob, rank) in enumerate(heapq.nsmallest(enough, pool)):
            parent, token = self._beams[order], SampledToken(token_id, logprob, rank, ((token_id, logprob, rank),))
            if token_id not in self._eos_token_ids:
                chosen.append((parent, -negative, token))
            elif place < width:
                self._finish((*parent.steps, token), -negative, "stop")
        self._grow(chosen[:width])
        if self._is_done():
            self._end("length")

    def _grow(self, chosen: list[tuple[Beam, float, SampledToken]]) -> None:
        """Make the chosen continuations the beams: the first child of a beam goes on in its tables, others fork them."""
        heirs: dict[int, TokenSequence] = {}
        grown: list[Beam] = []
        for index, (parent, logprob, token) in enumerate(chosen):
            if parent.sequence.index in heirs:
                sequence = self.scheduler.fork(parent.sequence, index)
            else:
                sequence = heirs[parent.sequence.index] = parent.sequence
            grown.append(Beam(sequence, logprob, (*parent.steps, token)))
        for beam in self._beams:
            if beam.sequence.index not in heirs:
                self.scheduler.finish(beam.sequence, "abort")
        for index, beam in enumerate(grown):
            beam.sequence.index = index
            beam.sequence.token_ids.append(beam.steps[-1].token_id)
        self.num_generated += len(grown)
        self._beams = grown
        self.request.sequences = [beam.sequence for beam in grown]
        self.request.is_forked = True

    def _is_done(self) -> bool:
        params = self._params
        if not self._beams:
            return True
        length = len(self._beams[0].steps)
        if length == self._longest:
            return True
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._longest
        return self._finished[-1].score >= self._score(self._beams[0].logprob, length)

    def _end(self, reason: FinishReason) -> None:
        """The live beams end; those cut off by the length are hypotheses too."""
        for beam in self._beams:
            if reason == "length" and len(beam.steps) == self._longest:
                self._finish(beam.steps, beam.logprob, "length")
        for sequence in self.request.unfinished:
            self.scheduler.finish(sequence, reason)

    @property
    def _longest(self) -> int:
        """Tokens of output at most."""
        return min(self._params.max_tokens, self.request.max_total_tokens - self.request.num_prompt_tokens)

    def _finish(self, steps: tuple[SampledToken, ...], logprob: float, reason: FinishReason) -> None:
        self._finished.append(Hypothesis(self._score(logprob, len(steps)), logprob, steps, reason))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._params.beam_width :]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _completion(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        token_ids = [token.token_id for token in hypothesis.steps]
        shown = token_ids[:-1] if hypothesis.reason == "stop" else token_ids
        text = "" if self._tokenizer is None else self._text(shown)
        logprobs: list[dict[int, Logprob]] = [logprob_dict(self._tokenizer, token) for token in hypothesis.steps]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=hypothesis.logprob,
            logprobs=logprobs,
            finish_reason=hypothesis.reason,
            stop_reason=self._error,
            score=hypothesis.score,
            delta_text=text,
        )

    def _text(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        detokenizer = Detokenizer(self._tokenizer, self.request.prompt_token_ids)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])
