"""A request as the engine tracks it: what happens with the logits it gets, and what its caller sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from ..outputs import CompletionOutput, Logprob, RequestOutput
from .request import Request
from .sampler import SampledToken, SamplingError, SamplingRow
from .scheduler import Scheduler
from .step import Scheduled

OnOutput = Callable[[RequestOutput], None]


class Tracked(ABC):
    """A request in the engine. Sampling and beam search differ in what they do with a row of logits."""

    def __init__(self, request: Request, scheduler: Scheduler, on_output: OnOutput | None, final_only: bool) -> None:
        """Outputs go to ``on_output`` if given, else to whoever steps the engine; ``final_only`` leaves out all but the last."""
        self.request = request
        self.scheduler = scheduler
        self.on_output = on_output
        self.final_only = final_only
        self.num_generated = 0  #: tokens drawn so far, by all sequences

    @abstractmethod
    def asks(self, item: Scheduled, unread: int = 0) -> list[SamplingRow]:
        """What to draw behind the last known token of a sequence, and behind each of the d tokens of its draft: 1 + d rows.

        ``unread`` tokens are drawn already and not known yet; what looks back at tokens cannot be told then.
        """

    @property
    @abstractmethod
    def wants_logits(self) -> bool:
        """Whether :meth:`take` needs the logits, and not the tokens alone."""

    @abstractmethod
    def take(self, item: Scheduled, tokens: Sequence[SampledToken | SamplingError], logits: np.ndarray | None) -> None:
        """What was drawn for :meth:`asks`, and the logits [1 + d, V] float32 that it was drawn from, which are not to be kept:
        None where the device drew and they have not come to the host.
        """

    @abstractmethod
    def fail(self, error: SamplingError) -> None:
        """End the request because its logits are of no use."""

    @abstractmethod
    def abort(self) -> None:
        """The request is about to be aborted: release what is held back of its text."""

    @abstractmethod
    def completions(self) -> list[CompletionOutput]:
        """What there is of its completions."""

    def prompt_rows(self, item: Scheduled) -> range:
        """Positions of the prompt whose logits are wanted, of those that a scheduled item has just computed."""
        return range(0)

    def score_prompt(self, position: int, logits: np.ndarray) -> None:  # noqa: B027  (not all ask for it)
        """Logits [n, V] float32 of the prompt's tokens from ``position`` on, as :meth:`prompt_rows` asked for."""

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Logprobs of the prompt, if they were asked for."""
        return None

    def output(self, finished: bool) -> RequestOutput:
        """What the caller sees now."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens or 0,
            prompt_logprobs=self.prompt_logprobs(),
            outputs=self.completions(),
            finished=finished,
        )
