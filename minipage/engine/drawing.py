"""From the hidden states of a step to tokens: on the device where it can draw them, else on the host from logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..kernels.draws import DRAW
from .filters import Filters
from .runner import Runner
from .sampler import SampledToken, SamplingError, SamplingRow, is_unadjusted, sample
from .scheduler import Scheduler
from .step import Scheduled, Step
from .tracked import Tracked

_SEED_MASK = 2**64 - 1
_WHOLE = 2**64  #: a probability of 1, in the units of a record's top_p


class Wanted(NamedTuple):
    """Tokens that a request waits for: rows of the step, that of a sequence's last known token and those of its draft."""

    tracked: Tracked
    item: Scheduled
    rows: range


class Drawn(NamedTuple):
    """The tokens of one :class:`Wanted`, and the logits [n, V] that they were drawn from, where those came to the host."""

    wanted: Wanted
    tokens: list[SampledToken | SamplingError]
    logits: np.ndarray | None

    def take(self) -> None:
        """Give the tokens to the request, which drops those of a sequence that has ended meanwhile."""
        self.wanted.tracked.take(self.wanted.item, self.tokens, self.logits)


class Launched:
    """Tokens that the device was asked for, of a part of what is wanted: they may be on their way."""

    def __init__(
        self,
        runner: Runner,
        part: list[Wanted],
        asks: list[list[SamplingRow]],
        token_ids: Callable[[], list[int]] | None = None,
    ) -> None:
        """Compute the logits of the last step's rows, and draw on the device what it can draw: the first, in ``order``.

        ``token_ids`` are those of ``part`` where the device has been asked for all of them already.
        """
        self._runner, self.part, self._asks = runner, part, asks
        self._on_device = [
            token_ids is not None or (runner.samples and not each.tracked.wants_logits and all(map(is_plain, of_each)))
            for each, of_each in zip(part, asks, strict=True)
        ]
        self._order = sorted(range(len(part)), key=lambda i: not self._on_device[i])
        self._plain = [ask for i in self._order if self._on_device[i] for ask in asks[i]]
        self._rows = [row for i in self._order for row in part[i].rows]
        self._token_ids = token_ids or list
        if self._plain and token_ids is None:
            self._token_ids = runner.compute_logits(self._rows, records(self._plain))

    @property
    def is_whole(self) -> bool:
        """Whether all is drawn on the device, a token for each, in the order of ``part``."""
        return all(self._on_device) and all(len(each.rows) == 1 for each in self.part)

    def read(self, logits_are_there: bool = True) -> list[Drawn]:
        """Wait for the tokens, and draw the others on the host; unless ``logits_are_there``, the device has drawn all.

        Logits that come along hold until others are computed.
        """
        tokens = [
            SampledToken(token_id) if token_id >= 0 else self._why_not(i, logits_are_there)
            for i, token_id in enumerate(self._token_ids())
        ]
        num_plain = len(self._plain)
        if num_plain < len(self._rows):
            read, runner = self._rows[num_plain:], self._runner
            logits = runner.read_logits(num_plain, len(self._rows)) if num_plain else runner.logits(read)
            tokens += sample(logits, [ask for i in self._order if not self._on_device[i] for ask in self._asks[i]])
        drawn, stop = {}, 0
        for i in self._order:
            start, stop = stop, stop + len(self._asks[i])
            own = None if self._on_device[i] else logits[start - num_plain : stop - num_plain]
            drawn[i] = Drawn(self.part[i], tokens[start:stop], own)
        return [drawn[i] for i in range(len(self.part))]

    def _why_not(self, row: int, logits_are_there: bool) -> SampledToken | SamplingError:
        """Why no token can be drawn from a row."""
        if not logits_are_there:
            return SamplingError("no token can be drawn: of the logits one is nan or inf, or all are -inf")
        return sample(self._runner.read_logits(row, row + 1), self._plain[row : row + 1])[0]


def launch(runner: Runner, wanted: Iterable[Wanted]) -> Iterator[Launched]:
    """Ask for what is wanted of the last step, in order, as many rows at once as there is room for."""
    for part in _parts(wanted, runner.max_logit_rows):
        yield Launched(runner, part, [each.tracked.asks(each.item) for each in part])


def launch_ahead(runner: Runner, scheduler: Scheduler, launched: Launched, step: Step) -> tuple[Step, Launched] | None:
    """Compute the step after ``step``, and ask for its tokens, before those that ``launched`` asked for are known here.

    None where that cannot be done, or would have nothing to run beside.
    """
    if not (runner.runs_ahead and launched.is_whole and len(launched.part) == len(step.scheduled)):
        return None
    asks = [each.tracked.asks(each.item, unread=1) for each in launched.part]
    rows = [row for of_each in asks for row in of_each]
    if not all(map(is_plain, rows)):
        return None
    ahead = scheduler.schedule_ahead(step)
    if ahead is None:
        return None
    token_ids = runner.execute_next(ahead, records(rows))
    part = [
        Wanted(each.tracked, item, range(row, row + 1))
        for row, (each, item) in enumerate(zip(launched.part, ahead.scheduled, strict=True))
    ]
    return ahead, Launched(runner, part, asks, token_ids)


def is_plain(row: SamplingRow) -> bool:
    """Whether temperature and filters are all that a row needs: no penalty, bias or ban, and no logprob."""
    return row.params.logprobs is None and is_unadjusted(row)


def records(rows: Sequence[SamplingRow]) -> np.ndarray:
    """Plain rows as records [R] of :data:`minipage.kernels.draws.DRAW`."""
    drawn = [(*_settings(Filters.of(row.params)), row.seed & _SEED_MASK, row.child, row.position) for row in rows]
    return np.array(drawn, DRAW)


@lru_cache(1024)
def _settings(filters: Filters) -> tuple[float, int, float, int]:
    """The first fields of a record, of a request that may be greedy."""
    greedy = filters.temperature == 0 or filters.top_k == 1
    top_p = 0 if filters.top_p == 1 else max(1, int(filters.top_p * _WHOLE))
    return 0.0 if greedy else float(filters.divisor), filters.top_k, filters.min_p, top_p


def _parts(wanted: Iterable[Wanted], most: int) -> Iterator[list[Wanted]]:
    """Split what is wanted into parts of at most ``most`` rows, which are as many as any of it has."""
    part: list[Wanted] = []
    num_rows = 0
    for each in wanted:
        if num_rows + len(each.rows) > most:
            yield part
            part, num_rows = [], 0
        part.append(each)
        num_rows += len(each.rows)
    if part:
        yield part
