"""The guard: marked text has no control tokens in it, and is encoded to the ids of the text that it was."""

from __future__ import annotations

import tracemalloc

import pytest
import tokenizers
from helpers.tokenizers import f3_backend, f4_backend, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from minipage.text.lookalikes import ESCAPE, ESCAPED_MARK, MARK, LookalikeGuard
from minipage.text.tokenizer import Tokenizer

F3 = wrap(f3_backend())
F4 = wrap(f4_backend())
#: Texts full of control tokens, of their parts, and of what the guard itself writes.
PARTS = st.sampled_from(
    ["<|stop|>", "<|st", "op|>", "<", "|", ">", "</s>", "<s", "s>", "a", " b", "é", "\n", MARK, ESCAPE, ESCAPED_MARK]
)
TEXTS = st.lists(PARTS | st.text(max_size=2), max_size=8).map("".join)


def literal_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in which the library is told to see no special tokens at all."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.encode_special_tokens = True
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("tokenizer", [F3, F4], ids=["F3", "F4"])
@given(text=TEXTS)
@settings(deadline=None)
def test_look_alikes_stay_text(tokenizer: Tokenizer, text: str) -> None:
    """The ids of a marked text are those of the text as plain text: nothing is changed, and nothing is a control token."""
    assert tokenizer.guard.encode(tokenizer.guard.mark(text)) == literal_ids(tokenizer, text)


@given(texts=st.lists(TEXTS, max_size=4))
@settings(deadline=None)
def test_control_tokens_between_texts_survive(texts: list[str]) -> None:
    """Where marked texts are joined by control tokens, exactly those are control tokens."""
    stop = F3.special_id("<|stop|>")
    ids = F3.guard.encode("<|stop|>".join(map(F3.guard.mark, texts)))
    expected = [[*literal_ids(F3, text), stop] for text in texts]
    assert ids == [token_id for piece in expected for token_id in piece][:-1]


@given(text=st.text("<|stop>"), cut=st.integers(0, 8))
@settings(deadline=None)
def test_no_control_token_is_put_together_from_two_texts(text: str, cut: int) -> None:
    """Two texts that follow one another spell out no control token together, wherever it is cut."""
    whole = text + "<|stop|>"
    ids = F3.guard.encode(F3.guard.mark(whole[:cut]) + F3.guard.mark(whole[cut:]))
    assert not F3.all_special_ids & set(ids)
    assert F3.decode(ids) == whole


@pytest.mark.parametrize("cut", range(1, len("<|stop|>")))
def test_a_template_does_not_complete_what_a_text_begins(cut: int) -> None:
    """Nor is one put together from a text's end and what the template writes after it, or before it and its start."""
    begun, rest = "<|stop|>"[:cut], "<|stop|>"[cut:]
    for text in (F3.guard.mark(begun) + rest, begun + F3.guard.mark(rest)):
        assert F3.guard.encode(text) == literal_ids(F3, "<|stop|>")


def test_ordinary_text_is_not_touched() -> None:
    """A text without anything like a control token is given as it is, and needs no second tokenizer."""
    tokenizer = wrap(f3_backend())
    assert tokenizer.guard.mark("What is a < b?") == "What is a < b?"
    tokenizer.guard.encode("What is a < b?")
    assert "_unmarking_backend" not in vars(tokenizer.guard)


def test_overlapping_look_alikes() -> None:
    """After marking, no control token is left, even where two of them share characters."""
    guard = LookalikeGuard(None, ["aba", "abaaba"])
    marked = guard.mark("xabababaabax")
    assert "aba" not in marked
    assert marked.replace(MARK, "") == "xabababaabax"


def test_control_tokens_that_the_normalizer_changes() -> None:
    """A special token that is searched for in the normalised text is kept apart as well."""
    backend = f3_backend(specials=())
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([tokenizers.AddedToken("<|bos|>", special=True, normalized=True)])
    tokenizer = wrap(backend)
    ids = tokenizer.guard.encode(tokenizer.guard.mark("a<|bos|>") + "<|bos|>")
    assert ids.count(tokenizer.special_id("<|bos|>") or -1) == 1
    assert ids[-1] == tokenizer.special_id("<|bos|>")


def test_a_long_control_token_takes_no_more_memory_than_its_length() -> None:
    """All its beginnings together are as long as the square of it: a checkpoint could fill the memory with one token."""
    long = "<|" + "x" * 3000 + "|>"
    tracemalloc.start()
    guard = LookalikeGuard(None, [long])
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 10 * len(long)
    assert guard.mark("a " + long[:1000]) == "a " + long[:1000] + MARK
    assert guard.mark(long[1000:] + " a") == MARK + long[1000:] + " a"
    assert guard.mark("a <| b") == "a <| b"
