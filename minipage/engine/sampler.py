"""From logits to tokens: one row of logits, one request, one token.

A row is computed by itself, from its own logits and its own request: who else is in the batch changes no bit.
Letters in shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sampling_params import SamplingParams
from . import philox

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]
Ids = NDArray[np.intp]
Uniform = Callable[[int, int, int], float]  #: (seed, child, position) -> a number in [0, 1]

_DRAW_BLOCK = 256  # weights summed at once by a draw, so that only one block is summed step by step
_FIRST_NUCLEUS = 256  # how many of the most likely tokens top-p looks at first
_TEMPERATURES = (1e-30, 1e30)  # what float32 can divide by; colder and hotter than this looks the same


class SamplingRow(NamedTuple):
    """What the sampler needs to know of the request that a row of logits belongs to."""

    params: SamplingParams
    seed: int
    child: int  #: which of the request's completions
    position: int  #: index in the output of the token to draw
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    banned: frozenset[int] = frozenset()  #: ids that must not be drawn now: the stopping ones, before min_tokens


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
    with np.errstate(over="ignore"):  # differences of logits over a small temperature: -inf is right
        return [_sample_row(row_logits, row, uniform) for row_logits, row in zip(logits, rows, strict=True)]


def prompt_logprobs(logits: Floats, token_ids: Sequence[int], num_top: int) -> list[SampledToken | SamplingError]:
    """Known tokens: ``token_ids[i]``, below V, under ``logits[i]`` [V] float32, the row that predicts it.

    Each comes with the ``num_top`` most likely tokens of its row; a row that :func:`sample` refuses is an error here.
    """
    with np.errstate(over="ignore"):
        return [
            _find_error(row, int(row.argmax())) or _token_logprobs(row, token_id, num_top)
            for row, token_id in zip(logits, token_ids, strict=True)
        ]


def _sample_row(logits: Floats, row: SamplingRow, uniform: Uniform) -> SampledToken | SamplingError:
    params = row.params
    best = int(logits.argmax())
    if error := _find_error(logits, best):
        return error
    adjusted = _adjust(logits, row)
    if adjusted is not logits:
        best = int(adjusted.argmax())
        if error := _find_error(adjusted, best):
            return error
    token_id = best
    if params.temperature > 0 and params.top_k != 1:
        token_id = _choose(adjusted, adjusted[best], params, uniform(row.seed, row.child, row.position))
    if params.logprobs is None:
        return SampledToken(token_id)
    return _token_logprobs(logits, token_id, params.logprobs)


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


def _adjust(logits: Floats, row: SamplingRow) -> Floats:
    """Logits after bans, penalties and bias; the array itself where the request has none of them.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), section 4.1, mended for negative logits.
    """
    params = row.params
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if not (row.banned or params.logit_bias or presence or frequency or repetition != 1.0):
        return logits
    adjusted = logits.copy()
    size = logits.size
    adjusted[_ids_below(size, row.banned)] = -np.inf
    if repetition != 1.0:
        seen = np.concatenate([_ids_below(size, row.prompt_token_ids), _ids_below(size, row.output_token_ids)])
        z = adjusted[seen]  # an id that was seen twice is written twice, with the same value
        adjusted[seen] = np.where(z > 0, z / repetition, z * repetition)
    if presence or frequency:
        seen, counts = np.unique(_ids_below(size, row.output_token_ids), return_counts=True)
        adjusted[seen] -= presence + frequency * counts
    for token_id, bias in (params.logit_bias or {}).items():
        if token_id < size:
            adjusted[token_id] += bias
    return adjusted


def _ids_below(size: int, token_ids: Collection[int]) -> Ids:
    """Ids as an array, without those that have no logit in a row of ``size``."""
    ids = np.fromiter(token_ids, dtype=np.intp, count=len(token_ids))
    return ids[ids < size]


# ---- the draw --------------------------------------------------------------------------------------------------------


def _choose(logits: Floats, peak: np.float32, params: SamplingParams, u: float) -> int:
    """The id that ``u`` in [0, 1] picks among those that temperature and filters leave; ``peak`` is the largest logit.

    Weights are probabilities times a constant: the most likely token weighs 1. A token that is filtered out weighs 0.
    """
    ids = _largest(logits, params.top_k) if 0 < params.top_k < logits.size else None
    weights = (logits if ids is None else logits[ids]) - peak
    coldest, hottest = _TEMPERATURES
    weights /= np.float32(min(max(params.temperature, coldest), hottest))
    np.exp(weights, out=weights)
    if params.top_p < 1:
        weights = _nucleus(weights, params.top_p)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0
    position = _draw(weights, u)
    return position if ids is None else int(ids[position])


def _largest(values: Floats, count: int) -> Ids:
    """Positions, ascending, of the ``count`` largest values; of equal ones the first. 1 <= count <= values.size."""
    smallest = np.partition(values, values.size - count)[values.size - count]
    positions = np.flatnonzero(values >= smallest)
    surplus = positions.size - count
    if surplus:
        ties = np.flatnonzero(values[positions] == smallest)
        positions = np.delete(positions, ties[-surplus:])
    return positions


def _nucleus(weights: Floats, top_p: float) -> Floats:
    """Weights of the fewest tokens, heaviest first, that together have ``top_p`` of the total; the others weigh 0.

    The token that crosses is kept (Holtzman et al., "The curious case of neural text degeneration", section 3.1).
    """
    wanted = top_p * weights.sum(dtype=np.float64)
    mass = _mass(weights, min(_FIRST_NUCLEUS, weights.size))
    if mass[-1] < wanted:
        mass = _mass(weights, weights.size)
    kept = _largest(weights, min(int(mass.searchsorted(wanted)) + 1, weights.size))
    nucleus = np.zeros_like(weights)
    nucleus[kept] = weights[kept]
    return nucleus


def _mass(weights: Floats, count: int) -> Sums:
    """Cumulative weight of the ``count`` heaviest, heaviest first."""
    rest = weights.size - count
    heaviest = np.sort(np.partition(weights, rest)[rest:])[::-1]
    return heaviest.cumsum(dtype=np.float64)


def _draw(weights: Floats, u: float) -> int:
    """Inverse of the cumulative distribution at ``u`` in [0, 1]; never a position that weighs nothing.

    First the block of positions that the mark falls into, then the position in it.
    """
    starts = np.arange(0, weights.size, _DRAW_BLOCK)
    cumulative = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    mark = u * float(cumulative[-1])
    block = _first_above(cumulative, mark)
    before = float(cumulative[block - 1]) if block else 0.0
    start = block * _DRAW_BLOCK
    inside = weights[start : start + _DRAW_BLOCK].cumsum(dtype=np.float64)
    return start + _first_above(inside, mark - before)


def _first_above(cumulative: Sums, mark: float) -> int:
    """The first index whose sum exceeds ``mark``, or reaches the total where none does: its own weight is not 0."""
    below_total = math.nextafter(cumulative[-1], 0.0)
    return int(cumulative.searchsorted(min(mark, below_total), side="right"))


# ---- logprobs --------------------------------------------------------------------------------------------------------


def _token_logprobs(logits: Floats, token_id: int, num_top: int) -> SampledToken:
    """``token_id`` under the softmax of a row of raw logits with a finite maximum, and the ``num_top`` most likely."""
    rank = 1 + int(np.count_nonzero(logits > logits[token_id]))
    ids = _largest(logits, min(num_top, logits.size)) if num_top else np.empty(0, np.intp)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    if token_id not in ids:
        ids = np.append(ids, token_id)
    ranks = 1 + np.searchsorted(-logits[ids], -logits[ids])  # the place of the first of equal ones ...
    ranks[ids == token_id] = rank  # ... except where the token comes after the others
    peak = logits.max()
    log_sum = math.log(np.exp(logits - peak).sum(dtype=np.float64))
    logprobs = logits[ids].astype(np.float64) - float(peak) - log_sum
    top = tuple(zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[ids == token_id][0]), rank, top)
