"""Random numbers as :mod:`kernels.philox` has them, as fractions of 2**64, and products with such fractions: integers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import int64, uint64

from .target import pure_function

Array = Any

_HALF, _MASK = uint64(32), uint64(0xFFFFFFFF)
_ROUNDS = 10
_FACTORS = uint64(0xD2511F53), uint64(0xCD9E8D57)
_STEPS = uint64(0x9E3779B9), uint64(0xBB67AE85)


@pure_function
def random_fraction(seed: Any, child: Any, position: Any) -> Any:
    """``philox.uniform(seed, child, position)`` times 2**64, exactly; all are uint64."""
    left_factor, right_factor = _FACTORS
    left_step, right_step = _STEPS
    c0, c1, c2, c3 = position, child, uint64(0), uint64(0)
    k0, k1 = seed & _MASK, seed >> _HALF
    for _ in range(_ROUNDS):
        left, right = left_factor * c0, right_factor * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _MASK, (left >> _HALF) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + left_step) & _MASK, (k1 + right_step) & _MASK
    return (((c0 >> uint64(5)) << uint64(26)) + (c1 >> uint64(6))) << uint64(11)


@pure_function
def part_of(total: Any, fraction: Any) -> Any:
    """total * fraction / 2**64, rounded down: of an int64 of 0 or more, and a uint64; by halves, as in long multiplication."""
    wide = uint64(total)
    a, b, c, d = wide >> _HALF, wide & _MASK, fraction >> _HALF, fraction & _MASK
    middle = a * d + ((b * d) >> _HALF)
    other = b * c + (middle & _MASK)
    return int64(a * c + (middle >> _HALF) + (other >> _HALF))


@pure_function
def join(low: Any, high: Any) -> Any:
    """Two words as a uint64."""
    return uint64(low) | (uint64(high) << _HALF)


def words_of(dtype: np.dtype[Any], field: str) -> int:
    """The index of the word at which a field of a record begins."""
    assert dtype.fields is not None
    return dtype.fields[field][1] // 4
