"""A request and its sequences: what is known, what is computed, what was decided. Plain data, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..cache import BlockTable
from ..outputs import FinishReason
from ..sampling_params import SamplingParams


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"  #: new, or preempted: holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt: the unit that has a block table.

    A step computes some of the tokens that are known but not computed; there is no prefill phase and no decode phase:

        | prompt tokens | output tokens     | next |
        |<---- num_computed --->|<- known ->|
    """

    index: int
    token_ids: list[int]  #: prompt and output
    num_prompt_tokens: int
    table: BlockTable
    num_computed: int = 0  #: tokens whose K and V are in the table's blocks
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - self.num_prompt_tokens

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
    params: SamplingParams
    seed: int
    max_total_tokens: int  #: prompt and output together never pass this
    sequences: list[Sequence] = field(default_factory=list)
    status: Status = Status.WAITING
    num_cached_tokens: int = 0  #: prompt tokens found in the prefix cache at the first admission
    was_admitted: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences that it takes of max_num_seqs: those to be forked count before they exist."""
        return len(self.unfinished) if self.is_forked else self.params.n

    @property
    def is_forked(self) -> bool:
        """Whether all n sequences exist."""
        return len(self.sequences) == self.params.n

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that go on, by index."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]
