"""Scales and minima of 4-bit groups, sought so that the squared error of their weights is small.

With 16 codes it pays to leave the largest weights of a group a little outside its grid. The search is that of llama.cpp's
make_qkx functions: from several grids to start with, alternate between the nearest codes for a grid and the best grid for
those codes (weighted least squares), and keep the grid that explains most.

Arrays are [GROUP_SIZE, M]: an input of all M groups is a row, so that sums over a group are sums of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .ops import Array

#: Steps of a grid with a minimum from the smallest to the largest weight of a group, where the search begins.
STEPS = (13, 14, 15, 16)
#: The code, counted from that of 0, of the weight of largest magnitude in a group, where the search for a symmetric grid begins.
EXTREMES = (-8, -7, 7, -8.7, -9.5, 7.7, 8.5)
ROUNDS = 3  #: of codes and least squares from each start


def fit(x: Array, importance: Array) -> tuple[Array, Array]:
    """Scale and minimum float32 [M] of groups ``x`` float32 [32, M], so that code * scale + minimum is near the weights.

    ``importance`` float32 [32, M] >= 0 weighs the squared error of each weight; not all are 0 in a group.
    """
    mean = np.add.reduce(importance * x, axis=0) / np.add.reduce(importance, axis=0)
    x = x - mean  # weights far from zero, too, have exact enough sums of products
    low, high = x.min(axis=0), x.max(axis=0)
    starts = (((high - low) / np.float32(steps), low) for steps in STEPS)
    scale, minimum = _search(x, importance, starts, codes=(0, 15))
    return scale, minimum + mean


def fit_symmetric(x: Array, importance: Array) -> Array:
    """Scale float32 [M], of either sign, so that (code - 8) * scale is near the weights; arguments as of :func:`fit`."""
    low, high = x.min(axis=0), x.max(axis=0)
    extreme = np.where(high > -low, high, low)
    starts = ((extreme / np.float32(code), np.zeros_like(extreme)) for code in EXTREMES)
    return _search(x, importance, starts, codes=(-8, 7))[0]


def _search(
    x: Array, importance: Array, starts: Iterable[tuple[Array, Array]], codes: tuple[int, int]
) -> tuple[Array, Array]:
    """The best scale and minimum [M] found from ``starts``; the minimum stays 0 where the lowest code is negative."""
    lowest, highest = map(np.float32, codes)
    total = np.add.reduce(importance, axis=0)
    best = [np.full_like(total, -1), np.zeros_like(total), np.zeros_like(total)]
    code, weighted, product = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    mean_code = np.zeros_like(total)
    for scale, minimum in starts:
        for _ in range(ROUNDS):
            np.subtract(x, minimum, out=code)
            np.multiply(code, 1 / _not_zero(scale), out=code)
            np.rint(code, out=code)
            np.clip(code, lowest, highest, out=code)
            np.multiply(importance, code, out=weighted)
            covariance = np.add.reduce(np.multiply(weighted, x, out=product), axis=0)
            variance = np.add.reduce(np.multiply(weighted, code, out=product), axis=0)
            if lowest == 0:
                mean_code = np.add.reduce(weighted, axis=0) / total
                variance -= total * mean_code * mean_code
            scale = covariance / _not_zero(variance)
            minimum = -scale * mean_code
        # covariance * scale is the part of the sum of squares that the grid explains.
        found = covariance * scale, scale, minimum
        better = found[0] > best[0]
        for kept, new in zip(best, found, strict=True):
            np.copyto(kept, new, where=better)
    return best[1], best[2]


def _not_zero(divisor: Array) -> Array:
    """The divisor, and 1 where it is 0 or so small that its inverse overflows: what is divided there is as small."""
    return np.where(np.abs(divisor) < np.finfo(np.float32).tiny, np.float32(1), divisor)
