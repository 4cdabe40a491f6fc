"""The proposals of prompt lookup: what followed the last tokens the last time, found without reading the text again."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.engine.speculation import LONGEST, NgramIndex


def look_up(token_ids: list[int], most: int) -> tuple[int, ...]:
    """What NgramIndex is to propose, by a search of the whole text."""
    for n in range(LONGEST, 0, -1):
        ends = [e for e in range(n, len(token_ids)) if token_ids[e - n : e] == token_ids[-n:]]
        if ends:
            start = ends[-1]
            agree = next((i for i in range(start) if token_ids[start - 1 - i] != token_ids[-1 - i]), start)
            copied = list(token_ids)
            for i in range(min(agree, most)):
                copied.append(copied[start + i])
            return tuple(copied[len(token_ids) :])
    return ()


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    most=st.integers(1, 8),
    asked=st.sets(st.integers(1, 40)),
)
@settings(max_examples=400, deadline=None)
def test_proposals_are_those_of_a_search(token_ids: list[int], most: int, asked: set[int]) -> None:
    """Whenever it is asked, the index proposes what followed the latest match of the last tokens, the longest n-gram first."""
    index = NgramIndex()
    for length in sorted(asked | {len(token_ids)}):
        known = token_ids[:length]
        assert index.propose(known, most) == look_up(known, most)


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=2, max_size=40),
    num_shared=st.integers(1, 39),
    most=st.integers(1, 8),
)
@settings(max_examples=400, deadline=None)
def test_an_index_that_is_shared_proposes_the_same(token_ids: list[int], num_shared: int, most: int) -> None:
    """Sequences that share the index of their beginning get what each would get alone."""
    num_shared = min(num_shared, len(token_ids) - 1)
    beginning = NgramIndex()
    one, two = NgramIndex(beginning, num_shared), NgramIndex(beginning, num_shared)
    turned = [*token_ids[:num_shared], *reversed(token_ids[num_shared:])]
    for length in range(num_shared + 1, len(token_ids) + 1):
        assert one.propose(token_ids[:length], most) == look_up(token_ids[:length], most)
        assert two.propose(turned[:length], most) == look_up(turned[:length], most)


def test_patterns_are_continued() -> None:
    """A guess goes on beyond the end of the text with itself, whatever the period."""
    assert NgramIndex().propose([7] * 9, 8) == (7,) * 8
    assert NgramIndex().propose([1, 2, 3] * 4, 8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert NgramIndex().propose([1, 2, 3], 8) == ()


class CountingList(list[int]):
    """Counts how many items are read."""

    num_reads = 0

    def __getitem__(self, key: Any) -> Any:
        CountingList.num_reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_a_proposal_does_not_read_the_text_again() -> None:
    """However long the text is, a token more costs the reading of a few."""
    rng = np.random.default_rng(0)
    index, text = NgramIndex(), CountingList(int(i) for i in rng.integers(0, 50, 3000))
    index.propose(text, 8)
    for token in rng.integers(0, 50, 50):
        text.append(int(token))
        CountingList.num_reads = 0
        index.propose(text, 8)
        assert CountingList.num_reads < 50
