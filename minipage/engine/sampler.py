"""From logits to tokens: a row of logits for each sequence, and a token for each row.

A row is computed by itself, from its own logits and its own request: who else is in the batch changes no bit.
Letters in shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..kernels import philox
from ..sampling_params import SamplingParams
from .filters import Candidates, Filters, Floats, Ids, draw, largest, top_k

Uniform = Callable[[int, int, int], float]  #: (seed, child, position) -> a number in [0, 1]

_NO_IDS: Ids = np.empty(0, np.intp)
_NO_COUNTS: Mapping[int, int] = MappingProxyType({})
_AT_ONCE = 1 << 16  # candidates that are drawn from together, so that they stay in the processor's cache


class Biases(NamedTuple):
    """The logit_bias of a request as arrays [n]."""

    ids: Ids = _NO_IDS
    values: Floats = np.empty(0, np.float32)

    @classmethod
    def of(cls, params: SamplingParams) -> Biases:
        """Those of a request."""
        biases = params.logit_bias or {}
        return cls(as_ids(biases), np.fromiter(biases.values(), np.float32, len(biases)))


class SamplingRow(NamedTuple):
    """What the sampler needs to know of the request that a row of logits belongs to.

    What it knows of tokens it has in a form that no step has to make anew from all of them: a request that gets long must not
    take more time with each token.
    """

    params: SamplingParams
    seed: int
    child: int  #: which of the request's completions
    position: int  #: index in the output of the token to draw
    prompt_ids: Ids = _NO_IDS  #: those in the prompt, each once
    output_counts: Mapping[int, int] = _NO_COUNTS  #: id -> how often it is in the output
    banned: Ids = _NO_IDS  #: ids that must not be drawn now: the stopping ones, before min_tokens
    biases: Biases = Biases()


class SampledToken(NamedTuple):
    """A token, drawn or known, and its place in the raw distribution: before penalties, bias, temperature, filters."""

    token_id: int
    logprob: float | None = None  #: natural logarithm; None where ``params.logprobs`` is None
    rank: int | None = None  #: 1 + the number of strictly larger logits, so that equal ones share a rank; None likewise
    #: (id, logprob, rank) of the most likely tokens, of equal ones the lowest ids; then this token, if not one of them
    top: tuple[tuple[int, float, int], ...] = ()


class SamplingError(ValueError):
    """A row of logits from which no token can be drawn: NaN or +inf in it, or every token masked."""


def sample(
    logits: Floats, rows: Sequence[SamplingRow], uniform: Uniform = philox.uniform
) -> list[SampledToken | SamplingError]:
    """One token for each row of ``logits`` [R, V] float32, which stay as they are.

    Banned ids are masked first; then penalties, logit bias, temperature, top-k, top-p and min-p follow in this order.
    ``uniform`` gives the one random number that a token takes. A row that gives no token has a SamplingError in its
    place, and the others are as they would be without it. Token ids of ``rows`` beyond V have no logit and are ignored.
    """
    chosen: list[int | SamplingError] = []
    pools: defaultdict[Filters, _Pool] = defaultdict(_Pool)
    for index, (row_logits, row) in enumerate(zip(logits, rows, strict=True)):
        adjusted, best = _most_likely(row_logits, row)
        chosen.append(best)
        if row.params.temperature > 0 and row.params.top_k != 1 and not isinstance(best, SamplingError):
            filters = Filters.of(row.params)
            pool = pools[filters]
            pool.add(index, top_k(adjusted, filters.top_k), uniform(row.seed, row.child, row.position))
            if pool.is_full:
                pools.pop(filters).draw(filters, chosen)
    for filters, pool in pools.items():
        pool.draw(filters, chosen)
    return [
        token if isinstance(token, SamplingError) else _sampled(row_logits, token, row.params.logprobs)
        for row_logits, row, token in zip(logits, rows, chosen, strict=True)
    ]


class _Pool:
    """Rows that want the same, until they are drawn from together."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._candidates: list[Candidates] = []
        self._uniforms: list[float] = []

    def add(self, index: int, candidates: Candidates, u: float) -> None:
        """Take in a row; ``index`` is its place in the batch."""
        self._indices.append(index)
        self._candidates.append(candidates)
        self._uniforms.append(u)

    @property
    def is_full(self) -> bool:
        """Whether to draw now, before more rows come."""
        return len(self._candidates) * self._candidates[0].logits.size >= _AT_ONCE

    def draw(self, filters: Filters, chosen: list[int | SamplingError]) -> None:
        """Put a token id into the place of each row."""
        token_ids = draw(self._candidates, filters, self._uniforms)
        for index, token_id in zip(self._indices, token_ids, strict=True):
            chosen[index] = token_id


def prompt_logprobs(logits: Floats, token_ids: Sequence[int], num_top: int) -> list[SampledToken | SamplingError]:
    """Known tokens: ``token_ids[i]``, below V, under ``logits[i]`` [V] float32, the row that predicts it.

    Each comes with the ``num_top`` most likely tokens of its row; a row that :func:`sample` refuses is an error here.
    """
    return [
        _find_error(row, int(row.argmax())) or _token_logprobs(row, token_id, num_top)
        for row, token_id in zip(logits, token_ids, strict=True)
    ]


def looks_back(params: SamplingParams) -> bool:
    """Whether the tokens so far change the logits of the next: where not, a :class:`SamplingRow` need not have them."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def is_unadjusted(row: SamplingRow) -> bool:
    """Whether a row is drawn from raw logits: no ban, no bias, no penalty."""
    return not (row.banned.size or row.biases.ids.size or looks_back(row.params))


def as_ids(token_ids: Collection[int]) -> Ids:
    """Token ids as an array."""
    return np.fromiter(token_ids, np.intp, len(token_ids))


def _most_likely(logits: Floats, row: SamplingRow) -> tuple[Floats, int | SamplingError]:
    """The logits that a row is drawn from, after bans, penalties and bias, and the id of the largest."""
    best = int(logits.argmax())
    error = _find_error(logits, best)
    if error is None and not is_unadjusted(row):
        logits = _adjust(logits, row)
        best = int(logits.argmax())
        error = _find_error(logits, best)
    return logits, error or best


def _sampled(logits: Floats, token_id: int, num_top: int | None) -> SampledToken:
    """A token with what is wanted of its place among raw logits."""
    return SampledToken(token_id) if num_top is None else _token_logprobs(logits, token_id, num_top)


def _find_error(logits: Floats, best: int) -> SamplingError | None:
    """Why nothing can be drawn from a row, if so; ``best`` is its argmax, which is a NaN where there is one."""
    peak = float(logits[best])
    if math.isfinite(peak):
        return None
    if peak == -math.inf:
        return SamplingError(f"no token can be drawn: all {logits.size} logits are -inf or masked")
    return SamplingError(
        f"no token can be drawn: the logit of token {best} is {peak}; allowed: finite numbers and -inf"
    )


# ---- penalties and bias ----------------------------------------------------------------------------------------------


@np.errstate(over="ignore")
def _adjust(logits: Floats, row: SamplingRow) -> Floats:
    """Logits after bans, penalties and bias.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), section 4.1, mended for negative logits.
    """
    params = row.params
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    adjusted = logits.copy()
    size = logits.size
    adjusted[row.banned[row.banned < size]] = -np.inf
    if looks_back(params):
        output_ids = as_ids(row.output_counts)
        counts = np.fromiter(row.output_counts.values(), np.intp, output_ids.size)[output_ids < size]
        output_ids = output_ids[output_ids < size]
    if repetition != 1.0:
        seen = np.concatenate([row.prompt_ids[row.prompt_ids < size], output_ids])
        z = adjusted[seen]  # an id that was seen twice is written twice, with the same value
        adjusted[seen] = np.where(z > 0, z / repetition, z * repetition)
    if presence or frequency:
        adjusted[output_ids] -= presence + frequency * counts
    ids, values = row.biases
    adjusted[ids[ids < size]] += values[ids < size]
    return adjusted


# ---- logprobs --------------------------------------------------------------------------------------------------------


@np.errstate(over="ignore")
def _token_logprobs(logits: Floats, token_id: int, num_top: int) -> SampledToken:
    """``token_id`` under the softmax of a row of raw logits with a finite maximum, and the ``num_top`` most likely."""
    rank = 1 + int(np.count_nonzero(logits > logits[token_id]))
    ids = largest(logits, min(num_top, logits.size)) if num_top else np.empty(0, np.intp)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    if token_id not in ids:
        ids = np.append(ids, token_id)
    ranks = 1 + np.searchsorted(-logits[ids], -logits[ids])  # the place of the first of equal ones ...
    ranks[ids == token_id] = rank  # ... except where the token comes after the others
    peak = logits.max()
    weights = logits - peak
    log_sum = math.log(np.exp(weights, out=weights).sum(dtype=np.float64))
    logprobs = logits[ids].astype(np.float64) - float(peak) - log_sum
    top = tuple(zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[ids == token_id][0]), rank, top)
