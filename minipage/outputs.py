"""What a request gives back: plain data, a snapshot that belongs to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_IDS_SHOWN = 8  #: of a list of token ids, in a repr

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position, in the model's own distribution: before penalties, bias, temperature and filters."""

    logprob: float  #: natural logarithm of its probability
    rank: int  #: 1 for the most likely token; equal logits share a rank
    decoded_token: str | None  #: the text of this token alone; None without a tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come. Text, token_ids and logprobs tell of the same tokens."""

    index: int  #: which of the request's n completions
    text: str  #: the whole text so far
    token_ids: list[int]  #: the whole output so far
    cumulative_logprob: float | None  #: sum of the chosen tokens' logprobs; None where logprobs were not asked for
    logprobs: list[dict[int, Logprob]] | None  #: one dict a token of the output, the chosen token always in it
    finish_reason: FinishReason | None = None  #: None while it goes on
    stop_reason: int | str | None = None  #: the stop id or stop string that ended it; None for the model's own end
    score: float | None = None  #: of a hypothesis of beam search; None for what was sampled
    delta_text: str = ""  #: what this output adds to the text of the one before it

    def __repr__(self) -> str:
        """The text, and token ids only as far as they fit a line."""
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={_short(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


@dataclass(slots=True)
class RequestOutput:
    """A request: its prompt, and its completions in the order of their index."""

    request_id: str
    prompt: str | None  #: None where the prompt was given as token ids
    prompt_token_ids: list[int]
    num_cached_tokens: int  #: tokens of the prompt that came from the prefix cache
    #: one entry a token of the prompt, where asked for; that of the first token, which follows nothing, is None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool  #: whether all completions have ended

    def __repr__(self) -> str:
        """As short as that of its completions."""
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, "
            f"prompt_token_ids={_short(self.prompt_token_ids)}, outputs={self.outputs!r}, finished={self.finished})"
        )


def _short(ids: Sequence[int]) -> str:
    """The first few ids, and how many there are."""
    if len(ids) <= _IDS_SHOWN:
        return str(list(ids))
    return f"[{', '.join(map(str, ids[:_IDS_SHOWN]))}, ... {len(ids)} in all]"
