"""What the caller gets to see of a sequence: text as it becomes certain, logprobs, and why it ended."""

from __future__ import annotations

import numpy as np

from ..outputs import CompletionOutput, Logprob
from ..sampling_params import SamplingParams
from ..text.detokenizer import Detokenizer
from ..text.stop import StopFilter
from ..text.tokenizer import Tokenizer
from .request import Request, Sequence
from .sampler import SampledToken, SamplingError, prompt_logprobs


class SequenceOutput:
    """Grows with each token of one sequence. ``token_ids`` and ``logprobs`` hold every generated token, the last one included
    that ended it (EOS, a stop token, the tokens of a stop string); ``text`` holds what is visible.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, request: Request, params: SamplingParams, index: int, stop: StopFilter
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._index = index
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._stop = stop
        self._delta: list[str] = []
        self._text: list[str] = []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []

    def push(self, sampled: SampledToken, *, is_stop_token: bool, may_stop: bool) -> str | None:
        """Take the next token. Returns the stop string that it completes, if any.

        A token that ends the generation by itself (``is_stop_token``) is visible only with include_stop_str_in_output.
        """
        if self._logprobs is not None and self._cumulative_logprob is not None and sampled.logprob is not None:
            self._logprobs.append(logprob_dict(self._tokenizer, sampled))
            self._cumulative_logprob += sampled.logprob
        if self._detokenizer is None or (is_stop_token and not self._params.include_stop_str_in_output):
            return None
        self._show(self._stop.push(self._detokenizer.push(sampled.token_id), may_stop=may_stop and not is_stop_token))
        return self._stop.stopped

    def finish(self) -> str | None:
        """Release what was held back for half a character or half a stop string; returns a stop string completed by it."""
        if self._detokenizer is not None and self._stop.stopped is None:
            self._show(self._stop.push(self._detokenizer.finish()))
            if self._stop.stopped is None:
                self._show(self._stop.finish())
        return self._stop.stopped

    def take(self, sequence: Sequence) -> CompletionOutput:
        """The state so far; ``delta_text`` is what became visible since the last call."""
        delta = "".join(self._delta)
        self._delta.clear()
        self._text = ["".join(self._text)]
        return CompletionOutput(
            index=self._index,
            text=self._text[0],
            token_ids=sequence.output_token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            delta_text=delta,
        )

    def _show(self, text: str) -> None:
        if text:
            self._delta.append(text)
            self._text.append(text)


def logprob_dict(tokenizer: Tokenizer | None, sampled: SampledToken) -> dict[int, Logprob]:
    """Token id -> Logprob of the most likely tokens and of the chosen one, the most likely first."""
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, logprob, rank in sampled.top
    }


class PromptLogprobs:
    """Logprobs of the tokens of a prompt, each given those before it; the first one has none."""

    def __init__(self, prompt_token_ids: list[int], num_top: int, tokenizer: Tokenizer | None) -> None:
        self._token_ids = prompt_token_ids
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._entries: list[dict[int, Logprob] | None] = [None] * len(prompt_token_ids)

    def score(self, start: int, logits: np.ndarray) -> SamplingError | None:
        """Logits [n, V] float32 are those that predict the tokens start .. start+n; returns what is wrong with them."""
        token_ids = self._token_ids[start : start + len(logits)]
        for offset, token in enumerate(prompt_logprobs(logits, token_ids, self._num_top)):
            if isinstance(token, SamplingError):
                return token
            self._entries[start + offset] = logprob_dict(self._tokenizer, token)
        return None

    def entries(self) -> list[dict[int, Logprob] | None]:
        """One dict a token, None for the first and for those not computed yet."""
        return list(self._entries)
