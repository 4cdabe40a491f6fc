"""A request and its sequences: what is known, what is computed, what was decided. Plain data, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..cache import Tables
from ..outputs import FinishReason
from ..sampling_params import BeamSearchParams, SamplingParams
from .speculation import NgramIndex


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"  #: new, or preempted and to be computed again: holds no blocks
    SWAPPED = "swapped"  #: preempted: its blocks are in the host pool
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt: the unit that has block tables.

    A step computes some of the tokens that are known but not computed; there is no prefill phase and no decode phase:

        | prompt tokens | output tokens     | next |
        |<---- num_computed --->|<- known ->|
    """

    index: int
    token_ids: list[int]  #: prompt and output
    num_prompt_tokens: int
    tables: Tables
    num_computed: int = 0  #: tokens whose K and V are in the tables' blocks
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    ngrams: NgramIndex = field(default_factory=NgramIndex)  #: of its tokens, as far as drafts were asked for

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_computed(self) -> bool:
        """Whether all known tokens are computed: the last one's logits say what comes next."""
        return self.num_computed == len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """A prompt and its n continuations. They are scheduled, preempted and resumed together.

    Until the first token is sampled there is one sequence; then the others are forked from it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    seed: int
    max_total_tokens: int  #: prompt and output together never pass this
    cache_salt: str | None = None  #: requests with different salts share no cached blocks
    width: int = 1  #: sequences that it can come to have
    sequences: list[Sequence] = field(default_factory=list)
    status: Status = Status.WAITING
    is_forked: bool = False  #: whether its first tokens are drawn and its sequences forked
    num_cached_tokens: int | None = None  #: prompt tokens found in the prefix cache at the first admission

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences that it takes of max_num_seqs: those that may yet be forked count before they exist."""
        may_fork = not self.is_forked or isinstance(self.params, BeamSearchParams)
        return self.width if may_fork else len(self.unfinished)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of every prompt token are wanted."""
        return isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None

    def most_to_come(self, sequence: Sequence) -> int:
        """How many more tokens a sequence can get."""
        room = self.max_total_tokens - len(sequence.token_ids)
        most = self.params.max_tokens
        return room if most is None else min(room, most - sequence.num_output_tokens)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that go on, by index."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]
