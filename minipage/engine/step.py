"""What the scheduler decides for a step, and what it counts: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..cache import BlockCopy, Swap
from .request import Request, Sequence


class Scheduled(NamedTuple):
    """``num_tokens`` tokens of a sequence from ``sequence.num_computed`` on: known ones, then those of a draft."""

    request: Request
    sequence: Sequence
    num_tokens: int
    draft: tuple[int, ...] = ()  #: guesses at what follows the last known token, to be verified

    @property
    def num_known(self) -> int:
        """How many of the tokens are known."""
        return self.num_tokens - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute; to be asked before the step is computed."""
        first = self.sequence.num_computed
        return [*self.sequence.token_ids[first : first + self.num_known], *self.draft]


@dataclass
class Step:
    """What one step does, in this order: swaps out, swaps in, copies, and then the computing of tokens."""

    swaps_out: list[Swap] = field(default_factory=list)
    swaps_in: list[Swap] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0  #: that the step computes; kept beside ``scheduled``, since it is asked for with each request


@dataclass
class Counters:
    """What has happened since the start."""

    preemptions: int = 0
    hit_tokens: int = 0
    copies: int = 0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
