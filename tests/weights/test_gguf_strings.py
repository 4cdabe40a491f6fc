"""Strings of a GGUF file, taken many at a time: always what reading them one by one gives."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.weights.gguf_strings import split_strings


def stored(texts: list[str]) -> bytes:
    """Strings as they are in a file."""
    return b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)


def one_by_one(window: bytes, most: int) -> tuple[list[str], int]:
    """The same by the definition."""
    texts: list[str] = []
    position = 0
    while len(texts) < most and position + 8 <= len(window):
        stop = position + 8 + int.from_bytes(window[position : position + 8], "little")
        if stop > len(window):
            break
        texts.append(window[position + 8 : stop].decode())
        position = stop
    return texts, position


PLAIN = st.text(st.characters(codec="utf-8", min_codepoint=1), min_size=1, max_size=12)
ODD = st.one_of(
    st.sampled_from(
        ["", "\0", "a\0", "\0" * 9, "\1" + "\0" * 7, "\2" + "\0" * 7 + "ab", "é" * 128, "x" * 255, "y" * 300]
    ),
    st.text(st.sampled_from("\0\1\2a"), max_size=20),
)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.lists(PLAIN, min_size=1, max_size=40), st.integers(1, 4), st.lists(ODD, max_size=3)), max_size=4
    ),
    cut=st.integers(0, 400),
    most=st.integers(0, 600),
)
def test_runs_are_what_single_strings_are(parts: list[tuple[list[str], int, list[str]]], cut: int, most: int) -> None:
    """Whatever stands between the plain ones, wherever the window ends, however many are wanted."""
    whole = stored([text for plain, times, odd in parts for text in [*plain * times, *odd]])
    window = whole[: max(0, len(whole) - cut)]
    assert split_strings(window, most) == one_by_one(window, most)
    assert split_strings(window, 1 << 62) == one_by_one(window, 1 << 62)


def test_a_bad_string_in_a_run_is_an_error() -> None:
    """Half a character at the end of one string does not join with what follows in the next."""
    texts = [b"plain"] * 50 + [b"caf\xc3", b"\xa9"] + [b"plain"] * 50
    window = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    with pytest.raises(UnicodeDecodeError):
        split_strings(window, 1 << 62)
