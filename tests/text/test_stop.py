"""The stop filter: what it finds, what it shows, and what it keeps to itself meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.errors import InvalidArgumentError
from minipage.text.stop import StopFilter

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)
PIECES = st.lists(st.tuples(st.text("abcd", max_size=5), st.booleans()), max_size=8)


def stream(stop_filter: StopFilter, pieces: list[tuple[str, bool]]) -> list[str]:
    return [stop_filter.push(text, may_stop=may_stop) for text, may_stop in pieces]


def find_stop(text: str, may_stop: list[bool], stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the first stop to be completed by a character that may stop; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths and may_stop[end - 1]:
            return end - max(lengths), end
    return None


@given(STOPS, PIECES, st.booleans())
@settings(deadline=None)
def test_stream_equals_search_of_the_whole_text(
    stops: list[str], pieces: list[tuple[str, bool]], include_stop: bool
) -> None:
    """However a text is cut, what is shown and which stop is found are those of a naive search of all of it."""
    stop_filter = StopFilter(stops, include_stop)
    shown = "".join(stream(stop_filter, pieces))
    text = "".join(piece for piece, _ in pieces)
    found = find_stop(text, [may_stop for piece, may_stop in pieces for _ in piece], stops)
    if found is None:
        assert stop_filter.stopped is None
        assert shown + stop_filter.finish() == text
    else:
        start, end = found
        assert stop_filter.stopped == text[start:end]
        assert shown == text[: end if include_stop else start]
        assert stop_filter.finish() == ""


@given(STOPS, st.lists(st.text("abcd", max_size=5), max_size=8))
@settings(deadline=None)
def test_holds_back_exactly_what_can_still_become_a_stop(stops: list[str], pieces: list[str]) -> None:
    """What is held back is the longest end of the text that begins a stop: no more, so that nothing waits in vain."""
    stop_filter = StopFilter(stops)
    shown = text = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        text += piece
        if stop_filter.stopped is not None:
            return
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings), default=0)
        assert shown == text[: len(text) - held]


@given(STOPS, PIECES)
@settings(deadline=None)
def test_order_of_the_list_does_not_matter(stops: list[str], pieces: list[tuple[str, bool]]) -> None:
    """The earliest stop wins whatever the order of the list."""
    one, other = StopFilter(stops), StopFilter(stops[::-1])
    assert stream(one, pieces) == stream(other, pieces)
    assert one.stopped == other.stopped


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (["world", "lo"], "hello world", "hel", "lo"),
        (["bc", "abc"], "xabcx", "x", "abc"),  # both end together: the longer one
        (["abcd", "b"], "abcd", "a", "b"),  # "b" is complete first
        (["aab"], "aaab", "a", "aab"),
        (["aaab", "ac"], "aaac", "aa", "ac"),  # the automaton falls back twice
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        ([], "text", "text", None),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, shown: str, stopped: str | None) -> None:
    """The stop whose last character comes first; of several, the longest."""
    stop_filter = StopFilter(stops)
    assert "".join(stop_filter.push(character) for character in text) == shown
    assert stop_filter.stopped == stopped


def test_a_stop_before_min_tokens_is_ignored_for_good() -> None:
    """A stop that a piece with may_stop=False completes is shown as text; the next one counts."""
    stop_filter = StopFilter(["END"])
    shown = stop_filter.push("a EN") + stop_filter.push("D b ", may_stop=False) + stop_filter.push("END c")
    assert shown == "a END b "
    assert stop_filter.stopped == "END"


def test_a_stop_may_begin_before_min_tokens() -> None:
    """Only the piece that completes a stop decides; its beginning may have come while stopping was not allowed."""
    stop_filter = StopFilter(["aa"])
    assert stop_filter.push("aa", may_stop=False) == "a"
    assert stop_filter.push("a") == ""
    assert stop_filter.stopped == "aa"


@given(STOPS, PIECES, PIECES)
@settings(deadline=None)
def test_a_fresh_filter_knows_the_same_stops(
    stops: list[str], one: list[tuple[str, bool]], other: list[tuple[str, bool]]
) -> None:
    """A filter made from one that is amid a text is as a new one, and neither changes the other."""
    used = StopFilter(stops)
    half = stream(used, one[:2])
    fresh = used.fresh()
    assert [*stream(fresh, other), fresh.finish()] == [*stream(new := StopFilter(stops), other), new.finish()]
    whole = [*half, *stream(used, one[2:]), used.finish()]
    assert whole == [*stream(alone := StopFilter(stops), one), alone.finish()]


def test_nothing_comes_after_a_stop() -> None:
    """Once stopped, the filter shows nothing more and keeps the stop that it found."""
    stop_filter = StopFilter(["x", "y"])
    assert stop_filter.push("ax") == "a"
    assert stop_filter.push("by") == ""
    assert stop_filter.finish() == ""
    assert stop_filter.stopped == "x"


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["a", 5]])
def test_empty_and_other_stops_are_refused(stops: list[str]) -> None:
    """A stop that is no string, or an empty one, is an error that shows it."""
    with pytest.raises(InvalidArgumentError, match=r"stop=(''|5)"):
        StopFilter(stops)


def test_many_long_stops_cost_linear_time() -> None:
    """A text of the worst kind, with 200 stops of 200 characters, takes a number of steps linear in its length."""
    stop_filter = StopFilter(["a" * 200 + chr(0x100 + n) for n in range(200)])
    steps = 0

    class CountingDict(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    stop_filter._children = [CountingDict(children) for children in stop_filter._children]
    text = ("a" * 199 + "b") * 100
    assert stop_filter.push(text) == text
    assert steps <= 2 * len(text)
