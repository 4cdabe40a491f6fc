"""Tokens from logits: a thread block a row, which it reads a few times and never sorts.

A row of 2**17 logits is read once to find the largest, three times by top-k and by top-p, and once to draw. Where there are as
many threads as top-k wants tokens, what each found largest is looked at first: it tells most tokens to be too small.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numpy import float32, int32, int64, uint32, uint64

from ..draws import DRAW
from .intrinsics import bits_float, float_bits
from .random import join, random_fraction, words_of
from .selection import PLACE_OF_NAN, THREADS, find_largest, make_find_id, make_find_rank, place_of
from .target import bounded_kernel, cuda, device_function, launch, pure_function, scratch

Array = Any

MAX_VOCAB = 1 << 22  #: so that the masses of all tokens add up to less than 2**63

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (words_of(DRAW, name) for name in ("temperature", "top_k", "top_p", "min_p"))
_SEED, _CHILD, _POSITION = (words_of(DRAW, name) for name in ("seed", "child", "position"))
_UNIT = float32(2**40)  # the mass of a weight of 1
_ONE = 0x3F800000  # the bits of 1.0
_LOGIT_BITS, _WEIGHT_BITS = 32, 29  # of a rank; that of a weight of 2**-40 is below 2**29


class Limits(NamedTuple):
    """What tokens have to pass, as far as it is known; a rank is smaller, the larger what it stands for."""

    largest: Any  #: logit of the row
    temperature: Any
    min_p: Any
    top_k: Any  #: the last rank of logits that top-k leaves
    last_of_k: Any  #: and of the tokens of that rank the last id
    top_p: Any  #: the same of weights and top-p
    last_of_p: Any


@pure_function
def rank_of_logit(x: Any) -> Any:
    """0 for the largest that there can be."""
    return PLACE_OF_NAN - place_of(x)


@pure_function
def mass_of(weight: Any) -> Any:
    """A weight in whole units; one of less than a unit has none."""
    return int64(weight * _UNIT)


@pure_function
def rank_of_weight(weight: Any) -> Any:
    """0 for a weight of 1."""
    return _ONE - int64(float_bits(weight))


@pure_function
def weight_of_rank(rank: Any) -> Any:
    """The other way round."""
    return bits_float(uint32(_ONE - rank))


@pure_function
def is_beyond(rank: Any, i: Any, limit: Any, last: Any) -> Any:
    """Whether a token is behind a limit: by its rank, or where that is the limit's, by its id."""
    return rank > limit or (rank == limit and i > last)


@pure_function
def weight_in_top_k(x: Any, i: Any, limits: Any) -> Any:
    """exp((x - largest) / temperature), or 0 behind the limit of top-k."""
    if is_beyond(rank_of_logit(x), i, limits.top_k, limits.last_of_k):
        return float32(0)
    return float32(math.exp((x - limits.largest) / limits.temperature))


# ---- entries of the searches -----------------------------------------------------------------------------------------
@pure_function
def logit_entry(x: Any, i: Any, limits: Any) -> Any:
    """Top-k: by logit, and each counts that is not behind the limit known so far."""
    rank = rank_of_logit(x)
    return rank, int64(1) if rank <= limits.top_k else int64(0)


@pure_function
def logit_tie_entry(x: Any, i: Any, limits: Any) -> Any:
    """Those at the limit of top-k: each counts."""
    return int64(1) if rank_of_logit(x) == limits.top_k else int64(0)


@pure_function
def weight_entry(x: Any, i: Any, limits: Any) -> Any:
    """Top-p: by weight, with its mass."""
    weight = weight_in_top_k(x, i, limits)
    return rank_of_weight(weight), mass_of(weight)


@pure_function
def weight_tie_entry(x: Any, i: Any, limits: Any) -> Any:
    """Those at the limit of top-p, with their mass."""
    weight = weight_in_top_k(x, i, limits)
    return mass_of(weight) if rank_of_weight(weight) == limits.top_p else int64(0)


@pure_function
def kept_entry(x: Any, i: Any, limits: Any) -> Any:
    """What all filters leave, with its mass."""
    weight = weight_in_top_k(x, i, limits)
    if weight < limits.min_p or is_beyond(rank_of_weight(weight), i, limits.top_p, limits.last_of_p):
        return int64(0)
    return mass_of(weight)


find_logit, find_logit_tie = make_find_rank(logit_entry), make_find_id(logit_tie_entry)
find_weight, find_weight_tie = make_find_rank(weight_entry), make_find_id(weight_tie_entry)
find_kept = make_find_id(kept_entry)


@device_function
def draw_token(logits: Array, row: Any, largest: Any, draws: Array, maxima: Array) -> Any:
    size, temperature, min_p = logits.shape[1], bits_float(draws[row, _TEMPERATURE]), bits_float(draws[row, _MIN_P])
    top_k, last_of_k, top_p, last_of_p = uint32(PLACE_OF_NAN), int32(size), uint32(PLACE_OF_NAN), int32(size)
    limits = Limits(largest, temperature, min_p, top_k, last_of_k, top_p, last_of_p)
    count = int64(draws[row, _TOP_K])
    if 0 < count < size:
        if count <= THREADS:
            # So many tokens are not below the one that is at that place among the largest of all threads: others need no count,
            # and are most of a row, in a few bins for which threads would queue.
            rank, left, ties = find_logit(maxima, row, limits, _LOGIT_BITS, count, uint64(0))
            limits = Limits(largest, temperature, min_p, uint32(rank), last_of_k, top_p, last_of_p)
        rank, left, ties = find_logit(logits, row, limits, _LOGIT_BITS, count, uint64(0))
        top_k = uint32(rank)
        limits = Limits(largest, temperature, min_p, top_k, last_of_k, top_p, last_of_p)
        if left < ties:
            last_of_k = int32(find_logit_tie(logits, row, limits, left, uint64(0)))
            limits = Limits(largest, temperature, min_p, top_k, last_of_k, top_p, last_of_p)
    part = join(draws[row, _TOP_P], draws[row, _TOP_P + 1])
    if part != uint64(0):
        rank, left, ties = find_weight(logits, row, limits, _WEIGHT_BITS, int64(0), part)
        top_p = uint32(rank)
        limits = Limits(largest, temperature, min_p, top_k, last_of_k, top_p, last_of_p)
        if left <= ties - mass_of(weight_of_rank(rank)):
            last_of_p = int32(find_weight_tie(logits, row, limits, left, uint64(0)))
            limits = Limits(largest, temperature, min_p, top_k, last_of_k, top_p, last_of_p)
    seed = join(draws[row, _SEED], draws[row, _SEED + 1])
    fraction = random_fraction(seed, uint64(draws[row, _CHILD]), uint64(draws[row, _POSITION]))
    return find_kept(logits, row, limits, int64(0), fraction)


@bounded_kernel(THREADS, blocks=1)
def sample_kernel(out: Array, logits: Array, draws: Array, maxima: Array) -> None:
    row = cuda.blockIdx.x
    token = find_largest(logits, row, maxima)
    if token >= 0 and draws[row, _TEMPERATURE] != 0:
        token = int64(draw_token(logits, row, logits[row, token], draws, maxima))
    if cuda.threadIdx.x == 0:
        out[row] = token


def sample(out: Array, logits: Array, draws: Array) -> None:
    """See :meth:`kernels.ops.Ops.sample`. ValueError where there are more tokens than that allows."""
    num_rows, size = logits.shape
    if size > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {size} tokens is not allowed; allowed: at most {MAX_VOCAB}")
    maxima = scratch("sample", num_rows * THREADS)[: num_rows * THREADS].reshape(num_rows, THREADS)
    launch(sample_kernel, (num_rows,), THREADS, out, logits, draws, maxima)
