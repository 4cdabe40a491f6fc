"""Philox4x32-10: random numbers without state.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), where Philox is defined. A keyed
bijection scrambles a counter, so that the number at any counter is had at once, in any order, and as often as wanted: a
sampled token depends on the request's seed and on its place in the output, on nothing that happened before.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four random 32-bit words that ``key`` (two words of 32 bits) has at ``counter`` (four)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = 0xD2511F53 * c0
        right = 0xCD9E8D57 * c2
        c0 = right >> 32 ^ c1 ^ k0
        c2 = left >> 32 ^ c3 ^ k1
        c1 = right & _MASK
        c3 = left & _MASK
        k0 = k0 + 0x9E3779B9 & _MASK  # a Weyl sequence: the golden ratio ...
        k1 = k1 + 0xBB67AE85 & _MASK  # ... and sqrt(3) - 1
    return c0, c1, c2, c3


def uniform(seed: int, child: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, for one token of one completion.

    The low 64 bits of ``seed`` are the key. ``child`` (index of the completion) and ``position`` (index of the token in
    the output), each below 2**32, are the counter.
    """
    high, low, _, _ = philox4x32((position, child, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return ((high >> 5 << 26) + (low >> 6)) / 2**53  # 27 and 26 bits
