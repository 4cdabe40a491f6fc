"""Tells one prompt from many, reads each as token ids, and refuses what can never be served, before anything is queued."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidArgumentError
from ..sampling_params import BeamSearchParams, SamplingParams
from ..text.tokenizer import Tokenizer

#: Text, token ids, or a mapping with "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams
Messages = Sequence[Mapping[str, Any]]


class CheckedParams(NamedTuple):
    """A copy of parameters, which fit the model, and how many sequences they take; any number of requests can share it."""

    params: Params
    width: int


class PromptReader:
    """Checks prompts against one model's vocabulary, length and pool."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        longest_total: Callable[[int, int], int | None],
    ) -> None:
        """``longest_total(num_prompt_tokens, n)`` says how long n sequences of a prompt can get in the pool (0: not at all, None:
        without end)."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._longest_total = longest_total

    def check_params(self, params: Params) -> CheckedParams:
        """Check parameters, in themselves and against the model; returns a copy, which whatever the caller does to its own does
        not change. Raises InvalidArgumentError."""
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise InvalidArgumentError(
                f"sampling params must be SamplingParams or BeamSearchParams, not {type(params).__name__}"
            )
        params = params.clone()
        if isinstance(params, BeamSearchParams):
            name, width = "beam_width", params.beam_width
        else:
            name, width = "n", params.n
            params.validate_for_vocab(self._vocab_size)
            if params.stop and self._tokenizer is None:
                raise InvalidArgumentError("stop strings need a tokenizer, which this model lacks; use stop_token_ids")
        if width > self._max_num_seqs:
            raise InvalidArgumentError(f"{name}={width} is not allowed; max_num_seqs={self._max_num_seqs} is the most")
        return CheckedParams(params, width)

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text (None where only ids were given) and its token ids. Raises InvalidArgumentError."""
        text, token_ids = self._split(prompt)
        if token_ids is None:
            token_ids = self._encode(text)
        if not token_ids:
            raise InvalidArgumentError("the prompt is empty; it must have at least one token")
        return text, token_ids

    def longest_total(self, num_tokens: int, n: int) -> int:
        """The most tokens, prompt and output, that a prompt can reach; refuses one without room for any output."""
        if num_tokens >= self._max_model_len:
            raise InvalidArgumentError(
                f"the prompt has {num_tokens} tokens; max_model_len={self._max_model_len} allows at most "
                f"{self._max_model_len - 1}, so that one can be generated"
            )
        longest = self._longest_total(num_tokens, n)
        if longest == 0:
            raise InvalidArgumentError(
                f"the prompt has {num_tokens} tokens, more than the whole KV cache holds; shorten it or give more num_blocks"
            )
        return self._max_model_len if longest is None else min(longest, self._max_model_len)

    def _split(self, prompt: Prompt) -> tuple[str | None, list[int] | None]:
        if isinstance(prompt, str):
            return prompt, None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidArgumentError(
                    f"a prompt mapping has the keys 'prompt' or 'prompt_token_ids', not {list(prompt)}"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise InvalidArgumentError(f"prompt must be a string, not {type(text).__name__}")
            return text, None if ids is None else self._check_ids(ids)
        return None, self._check_ids(prompt)

    def _encode(self, text: str | None) -> list[int]:
        if self._tokenizer is None:
            raise InvalidArgumentError("this model has no tokenizer.json, so prompts must be token ids")
        if text is None:
            raise InvalidArgumentError("a prompt mapping needs 'prompt' or 'prompt_token_ids'")
        most = self._max_model_len * self._tokenizer.longest_token
        if len(text) > most:  # not worth the time of splitting it into tokens
            raise InvalidArgumentError(
                f"the prompt has {len(text)} characters; max_model_len={self._max_model_len} allows at most {most}"
            )
        token_ids = self._tokenizer.encode(text)
        if max(token_ids, default=0) >= self._vocab_size:
            unknown = next(token_id for token_id in token_ids if token_id >= self._vocab_size)
            raise InvalidArgumentError(
                f"the prompt has the token {self._tokenizer.token(unknown)!r}, which is {unknown} in the tokenizer and not in "
                f"the model: allowed are ids from 0 to {self._vocab_size - 1}"
            )
        return token_ids

    def _check_ids(self, ids: Iterable[Any]) -> list[int]:
        if not isinstance(ids, Iterable) or isinstance(ids, bytes):
            raise InvalidArgumentError(f"a prompt must be a string or a list of token ids, not {type(ids).__name__}")
        checked = []
        for index, value in enumerate(ids):
            try:
                token_id = operator.index(value)
            except TypeError:
                token_id = -1
            if isinstance(value, bool) or not 0 <= token_id < self._vocab_size:
                raise InvalidArgumentError(
                    f"prompt_token_ids[{index}]={value!r} is not allowed; it must be an integer from 0 to {self._vocab_size - 1}"
                )
            checked.append(token_id)
        return checked


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: a string, a mapping and a list of integers are one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_list = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__") and getattr(prompts, "ndim", 1) > 0
    if not is_list:  # sets have no order, and an array may be one number
        raise InvalidArgumentError(f"prompts must be text, token ids, or a list of them, not {type(prompts).__name__}")
    if len(prompts) and not hasattr(prompts[0], "__len__"):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Tell one conversation from many: the first message of one is a mapping."""
    if not isinstance(messages, Sequence):
        raise InvalidArgumentError(
            f"messages must be a list of messages, or a list of such lists, not {type(messages).__name__}"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)  # type: ignore[list-item,arg-type]


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of ``count`` prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidArgumentError(
            f"sampling_params must be SamplingParams, or a list of them, not {type(params).__name__}"
        )
    if len(params) != count:
        raise InvalidArgumentError(
            f"{len(params)} sampling_params were given for {count} prompts; give one, or one a prompt"
        )
    return list(params)
