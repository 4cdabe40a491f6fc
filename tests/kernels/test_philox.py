"""The counter-based generator against its authors' known answers, and the uniforms made of it."""

from __future__ import annotations

import itertools
import math

import pytest

from minipage.kernels.philox import philox4x32, uniform

MASK = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Philox4x32-10 gives the words that Random123 publishes for these counters and keys."""
    assert philox4x32(counter, key) == words


def test_uniform_is_53_bits_of_the_first_two_words() -> None:
    """The fraction is made of the upper 27 and 26 bits of two words, so that it never reaches 1."""
    high, low, _, _ = philox4x32((7, 2, 0, 0), (0xDEADBEEF, 5))
    assert uniform((5 << 32) + 0xDEADBEEF, 2, 7) == ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    assert ((MASK >> 5 << 26) + (MASK >> 6)) / 2**53 < 1.0


def test_uniform_depends_on_all_of_seed_child_and_position() -> None:
    """Seeds of 64 bits, children and positions all give numbers of their own; negative seeds are their 64 bits."""
    places = [(s, c, p) for s in (0, 1, 2**32, 2**63, 2**64 - 1) for c in (0, 1, 127) for p in (0, 1, 2**31)]
    assert len({uniform(*place) for place in places}) == len(places)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


@pytest.mark.parametrize("place", [(1, 0), (0, 1)], ids=["children", "positions"])
def test_uniform_is_uniform(place: tuple[int, int]) -> None:
    """Mean, variance and the correlation of neighbours are within 4 sigma of those of independent uniforms."""
    count = 20_000
    values = [uniform(1234, place[0] * i, place[1] * i) - 0.5 for i in range(count)]
    assert abs(sum(values) / count) < 4 * math.sqrt(1 / 12 / count)
    assert abs(sum(v * v for v in values) / count - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    neighbours = sum(a * b for a, b in itertools.pairwise(values)) / (count - 1)
    assert abs(neighbours) < 4 / 12 / math.sqrt(count)
