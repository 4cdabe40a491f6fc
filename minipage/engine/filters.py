"""Temperature, top-k, top-p, min-p, and the draw from what they leave: for all rows at once that want the same.

Each row is computed as if it were alone: sums go over its own numbers, in an order that does not depend on the others.
Letters in shapes: R rows, V vocabulary, K candidates of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sampling_params import SamplingParams

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]
Ids = NDArray[np.intp]

_DRAW_BLOCK = 256  # weights summed at once by a draw, so that only one block is summed step by step
_FIRST_NUCLEUS = 256  # how many of the most likely tokens top-p looks at first; then at eight times as many, and so on
_BUCKET_BITS = 15  # of a float32's 23, by which weights in one bucket may differ
_GROUPS = 16  # for each of the largest values sought, whose maxima tell how large those are at least
_TEMPERATURES = (1e-30, 1e30)  # what float32 can divide by; colder and hotter than this looks the same


class Filters(NamedTuple):
    """What makes a distribution of logits, and leaves unlikely tokens out of it; as in SamplingParams."""

    temperature: float  #: 0 is greedy
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        """Those of a request."""
        return cls(params.temperature, params.top_k, params.top_p, params.min_p)

    @property
    def divisor(self) -> np.float32:
        """What logits are divided by: the temperature, which must not be 0, as float32 can divide by it."""
        coldest, hottest = _TEMPERATURES
        return np.float32(min(max(self.temperature, coldest), hottest))


class Candidates(NamedTuple):
    """The tokens of a row that top-k leaves."""

    ids: Ids | None  #: [K], ascending; None: all of them
    logits: Floats  #: [K]


def top_k(logits: Floats, count: int) -> Candidates:
    """The ``count`` largest of logits [V], of equal ones those of the lowest ids; 0: all of them."""
    if not 0 < count < logits.size:
        return Candidates(None, logits)
    ids = largest(logits, count)
    return Candidates(ids, logits[ids])


@np.errstate(over="ignore")  # differences of logits over a small temperature: -inf is right
def draw(rows: Sequence[Candidates], filters: Filters, uniforms: Sequence[float]) -> list[int]:
    """The token id of each row that its uniform, in [0, 1], picks. All rows have as many candidates, and a finite maximum;
    the temperature is above 0.

    Weights are probabilities times a constant: the most likely token weighs 1. A token that is filtered out weighs 0.
    """
    weights = np.stack([row.logits for row in rows])
    weights -= weights.max(axis=1, keepdims=True)
    weights /= filters.divisor
    np.exp(weights, out=weights)
    if filters.top_p < 1:
        weights = _nucleus(weights, filters.top_p)
    if filters.min_p > 0:
        weights[weights < filters.min_p] = 0
    positions = _pick(weights, np.array(uniforms)).tolist()
    return [at if row.ids is None else int(row.ids[at]) for row, at in zip(rows, positions, strict=True)]


def largest(values: Floats, count: int) -> Ids:
    """Positions, ascending, of the ``count`` largest of values [V]; of equal ones the first. 1 <= count <= V.

    Of ``count`` groups of values at least, the maximum reaches the ``count``-th largest of the maxima of all groups. So only
    what reaches it has to be sorted.
    """
    groups = _GROUPS * count
    size = values.size // groups
    maxima = values[: size * groups].reshape(size, groups).max(axis=0) if size > 1 else values
    bound = np.partition(maxima, maxima.size - count)[maxima.size - count]
    positions: Ids = (values >= bound).nonzero()[0]
    if positions.size > count:
        positions = positions[_order(values[positions])[:count]]
        positions.sort()
    return positions


def _order(values: Floats) -> Ids:
    """Positions along the last axis, the largest first; of equal ones the first."""
    order: Ids = np.argsort(-values, axis=-1, kind="stable")
    return order


def _nucleus(weights: Floats, top_p: float) -> Floats:
    """Weights [R, K] of the fewest tokens, heaviest first, that together have ``top_p`` of their row; the others weigh 0.

    The token that crosses is kept (Holtzman et al., "The curious case of neural text degeneration", section 3.1).
    """
    wanted = top_p * np.array([[row.sum(dtype=np.float64)] for row in weights])
    count = min(_FIRST_NUCLEUS, weights.shape[1])
    mass, heaviest = _mass(weights, count)
    nucleus = np.zeros(weights.shape, np.float32)
    is_kept = _is_before(mass, wanted)
    rows, kept = is_kept.nonzero()[0], heaviest[is_kept]
    nucleus[rows, kept] = weights[rows, kept]
    if count < weights.shape[1]:
        for row in (mass[:, -1] < wanted[:, 0]).nonzero()[0]:
            kept = _wide_nucleus(weights[row], float(wanted[row, 0]))
            nucleus[row, kept] = weights[row, kept]
    return nucleus


def _is_before(mass: Sums, wanted: Sums | float) -> NDArray[np.bool_]:
    """Where cumulative weights [R, K] have not reached what is wanted, and the one that crosses."""
    is_kept: NDArray[np.bool_] = mass < wanted
    is_kept[:, 1:] = is_kept[:, :-1]
    is_kept[:, 0] = True
    return is_kept


def _wide_nucleus(weights: Floats, wanted: float) -> Ids:
    """Positions of the nucleus of weights [V] where it is more than a few tokens."""
    kept = _flat_nucleus(weights, wanted)
    count = _FIRST_NUCLEUS
    while kept is None:
        count = min(8 * count, weights.size)
        mass, heaviest = _mass(weights[None], count)
        if count == weights.size or mass[0, -1] >= wanted:
            kept = heaviest[_is_before(mass, wanted)]
    return kept


def _flat_nucleus(weights: Floats, wanted: float) -> Ids | None:
    """The same without sorting all of it, or None where it has tokens too light for that.

    Weights are counted into buckets, heaviest first, and sorted only in the bucket that crosses. Float64 holds the sums of so
    heavy weights exactly, so that no sum depends on the order that it is made in: with a last bit of at least 2^-k each,
    and none above 1, V of them need k + log2(V) bits.
    """
    last_bit = np.finfo(np.float64).nmant + 1 - weights.size.bit_length()
    positions = (weights >= 2.0 ** (np.finfo(np.float32).nmant - last_bit)).nonzero()[0]
    heavy = weights[positions]
    buckets = (np.float32(1).view(np.int32) - heavy.view(np.int32)) >> _BUCKET_BITS
    sums = np.bincount(buckets, weights=heavy).cumsum()
    crossing = int(np.searchsorted(sums, wanted))
    if crossing == sums.size:
        return None
    inside = (buckets == crossing).nonzero()[0]
    inside = inside[_order(heavy[inside])]
    mass = (sums[crossing - 1] if crossing else 0.0) + heavy[inside].cumsum(dtype=np.float64)
    inside = inside[_is_before(mass[None], wanted)[0]]
    kept: Ids = positions[np.concatenate([(buckets < crossing).nonzero()[0], inside])]
    return kept


def _mass(weights: Floats, count: int) -> tuple[Sums, Ids]:
    """Cumulative weight of the ``count`` heaviest of each row, heaviest first, and their positions."""
    rows = np.arange(len(weights))[:, None]
    if count < weights.shape[1]:
        heaviest = np.stack([largest(row, count) for row in weights])
        ordered = heaviest[rows, _order(weights[rows, heaviest])]
    else:
        ordered = _order(weights)
    return weights[rows, ordered].cumsum(axis=1, dtype=np.float64), ordered


def _pick(weights: Floats, uniforms: Sums) -> Ids:
    """Inverse of the cumulative distribution of weights [R, K] at uniforms [R]; never a position that weighs nothing.

    First the block of positions that the mark falls into, then the position in it.
    """
    num_rows, size = weights.shape
    sums = np.add.reduceat(weights.astype(np.float64), np.arange(0, size, _DRAW_BLOCK), axis=1).cumsum(axis=1)
    marks = uniforms * sums[:, -1]
    if size <= _DRAW_BLOCK:
        return _first_above(weights.cumsum(axis=1, dtype=np.float64), marks)
    rows = np.arange(num_rows)
    blocks = _first_above(sums, marks)
    marks -= np.where(blocks > 0, sums[rows, blocks - 1], 0.0)
    positions = (blocks * _DRAW_BLOCK)[:, None] + np.arange(_DRAW_BLOCK)
    inside = weights[rows[:, None], np.minimum(positions, size - 1)]
    inside[positions >= size] = 0
    picked: Ids = blocks * _DRAW_BLOCK + _first_above(inside.cumsum(axis=1, dtype=np.float64), marks)
    return picked


def _first_above(cumulative: Sums, marks: Sums) -> Ids:
    """Of each row the first index whose sum exceeds its mark, or reaches the total where none does: its weight is not 0."""
    below_total = np.nextafter(cumulative[:, -1], 0.0)
    first: Ids = (cumulative <= np.minimum(marks, below_total)[:, None]).sum(axis=1)
    return first
