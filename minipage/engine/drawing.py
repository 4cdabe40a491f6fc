"""From the hidden states of a step to tokens: on the device where it can draw them, else on the host from logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..kernels.draws import DRAW
from .filters import Filters
from .runner import Runner
from .sampler import SampledToken, SamplingError, SamplingRow, looks_back, sample
from .step import Scheduled
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
        """Give the tokens to the request."""
        self.wanted.tracked.take(self.wanted.item, self.tokens, self.logits)


def draw(runner: Runner, wanted: Iterable[Wanted]) -> Iterator[list[Drawn]]:
    """What is wanted of the last step, in order, as many rows at once as there is room for; logits hold until the next part."""
    for part in _parts(wanted, runner.max_logit_rows):
        yield _draw_part(runner, part)


def _draw_part(runner: Runner, part: list[Wanted]) -> list[Drawn]:
    asks = [each.tracked.asks(each.item) for each in part]
    on_device = [
        runner.samples and not each.tracked.wants_logits and all(map(is_plain, of_each))
        for each, of_each in zip(part, asks, strict=True)
    ]
    order = sorted(range(len(part)), key=lambda i: not on_device[i])  # those that the device draws come first
    rows = [row for i in order for row in part[i].rows]
    ordered = [ask for i in order for ask in asks[i]]
    num_plain = sum(len(asks[i]) for i in order if on_device[i])
    tokens = _draw_on_device(runner, rows, ordered[:num_plain]) if num_plain else []
    logits = runner.read_logits(num_plain, len(rows)) if num_plain else runner.logits(rows)
    tokens += sample(logits, ordered[num_plain:])
    drawn, stop = {}, 0
    for i in order:
        start, stop = stop, stop + len(asks[i])
        own = None if on_device[i] else logits[start - num_plain : stop - num_plain]
        drawn[i] = Drawn(part[i], tokens[start:stop], own)
    return [drawn[i] for i in range(len(part))]


def _draw_on_device(runner: Runner, rows: list[int], asks: list[SamplingRow]) -> list[SampledToken | SamplingError]:
    """Compute the logits of ``rows``, and draw tokens from the first of them; where one has none, the host says why."""
    token_ids = runner.compute_logits(rows, records(asks))
    return [
        SampledToken(token_id) if token_id >= 0 else sample(runner.read_logits(i, i + 1), asks[i : i + 1])[0]
        for i, token_id in enumerate(token_ids)
    ]


def is_plain(row: SamplingRow) -> bool:
    """Whether temperature and filters are all that a row needs: no penalty, bias or ban, and no logprob."""
    params = row.params
    return params.logprobs is None and not (row.banned or params.logit_bias or looks_back(params))


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
