"""Incremental detokenisation: the text of one-shot decoding, character by character, nothing twice and nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import tokenizers
from helpers.tokenizers import F4_PIECES, F4_SPECIALS, f3_backend, f4_backend, f4_byte_ids, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from minipage.text.detokenizer import Detokenizer
from minipage.text.tokenizer import Tokenizer
from minipage.text.tokenizer_files import TokenizerSettings

F3 = wrap(f3_backend())
F4 = wrap(f4_backend())
F4_LETTERS = {ord(piece): len(F4_SPECIALS) + 256 + n for n, piece in enumerate(F4_PIECES) if piece in set("abcx.!")}
EMOJI = "😀".encode()
FAMILY = "👨‍👩‍👧"


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte; in F4, letters are pieces of their own."""
    if tokenizer is F3:
        return list(data)
    return [F4_LETTERS.get(byte, f4_byte_ids(bytes([byte]))[0]) for byte in data]


def deltas(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True) -> list[str]:
    """What each token shows, and last what was held back."""
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.finish()]


# ---- characters of several bytes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokenizer", [F3, F4], ids=["F3", "F4"])
class TestCharactersOfSeveralBytes:
    """All that can happen to a character that is several tokens, for byte-level and for byte fallback."""

    def test_a_character_comes_whole(self, tokenizer: Tokenizer) -> None:
        """A character is shown with its last byte and not before; the next one does not hold it up."""
        shown = deltas(tokenizer, byte_ids(tokenizer, b"."), byte_ids(tokenizer, "a😀é".encode()))
        assert shown == ["a", "", "", "", "😀", "", "é", ""]

    def test_family_emoji(self, tokenizer: Tokenizer) -> None:
        """An emoji of several characters with joiners between comes through, no U+FFFD in any delta."""
        shown = deltas(tokenizer, byte_ids(tokenizer, b"."), byte_ids(tokenizer, FAMILY.encode()))
        assert "".join(shown) == FAMILY
        assert [character for character in shown if character] == list(FAMILY)

    def test_genuine_replacement_character(self, tokenizer: Tokenizer) -> None:
        """A U+FFFD that the text really has is shown once, as soon as it is complete, and is not held back at the end."""
        shown = deltas(tokenizer, byte_ids(tokenizer, b"."), byte_ids(tokenizer, "a\ufffd".encode()))
        assert shown == ["a", "", "", "\ufffd", ""]

    def test_stray_byte(self, tokenizer: Tokenizer) -> None:
        """A byte that cannot begin a character is one U+FFFD."""
        assert "".join(deltas(tokenizer, [], byte_ids(tokenizer, b"\x98ab"))) == "\ufffdab"

    def test_cut_character(self, tokenizer: Tokenizer) -> None:
        """A character cut after 3 of its 4 bytes is shown at the end only, as one-shot decoding has it."""
        output = byte_ids(tokenizer, b"a" + EMOJI[:3])
        shown = deltas(tokenizer, [], output)
        assert shown[:-1] == ["a", "", "", ""]
        assert "a" + shown[-1] == tokenizer.decode(output)

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_prompt_ends_within_a_character(self, tokenizer: Tokenizer, cut: int) -> None:
        """The output completes the character and gets it whole; nothing of the prompt is shown again."""
        prompt = byte_ids(tokenizer, b"abc" + EMOJI[:cut])
        shown = deltas(tokenizer, prompt, byte_ids(tokenizer, EMOJI[cut:] + b"!"))
        assert [text for text in shown if text] == ["😀", "!"]

    def test_prompt_ends_within_a_genuine_replacement_character(self, tokenizer: Tokenizer) -> None:
        """The output completes a U+FFFD that the text really has: it is the output's, although the prompt's text ends so too."""
        bytes_of_it = "\ufffd".encode()
        prompt = byte_ids(tokenizer, b"a" + bytes_of_it[:2])
        assert deltas(tokenizer, prompt, byte_ids(tokenizer, bytes_of_it[2:])) == ["\ufffd", ""]

    def test_prompt_ends_within_a_character_that_stays_broken(self, tokenizer: Tokenizer) -> None:
        """The broken half is the prompt's, and not shown."""
        prompt = byte_ids(tokenizer, b"a" + EMOJI[:2])
        assert deltas(tokenizer, prompt, byte_ids(tokenizer, b"x")) == ["x", ""]

    def test_finish_gives_once(self, tokenizer: Tokenizer) -> None:
        """What finish gave, it does not give again."""
        detokenizer = Detokenizer(tokenizer, [])
        detokenizer.push(byte_ids(tokenizer, EMOJI)[0])
        assert (detokenizer.finish(), detokenizer.finish()) == ("\ufffd", "")


# ---- the rule ------------------------------------------------------------------------------------------------------------
F3_IDS = st.lists(
    st.one_of(
        st.integers(0, F3.vocab_size + 3),
        st.sampled_from([*EMOJI, *"\ufffdéa".encode(), 0xE0, 0xED, 0xF4, 0x80, 0x9F, 0xA0]),
    ),
    max_size=24,
)


def completes(data: bytes) -> bool:
    """Whether more bytes can make ``data`` one character."""
    candidates = (data + bytes(more) for n in (1, 2, 3) for more in product((0x80, 0x90, 0xA0, 0xBF), repeat=n))
    return any(_is_character(candidate) for candidate in candidates)


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


@given(prompt=F3_IDS, output=F3_IDS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_equals_one_shot_decoding(prompt: list[int], output: list[int], skip: bool) -> None:
    """For any ids: the library's text of prompt and output, less that of the prompt, save a character that they share."""
    head, whole = F3.decode(prompt, skip), F3.decode(prompt + output, skip)
    hidden = F3.all_special_ids if skip else frozenset()
    data = [b"".join(F3.token_bytes(i) for i in ids if i not in hidden) for ids in (prompt, output)]
    begun = next((data[0][-n:] for n in (3, 2, 1) if len(data[0]) >= n and completes(data[0][-n:])), b"")
    is_completed = begun and any(_is_character((begun + data[1])[:n]) for n in range(len(begun) + 1, 5))
    expected = whole[len(head) - 1 :] if is_completed else whole[len(head) :]
    assert "".join(deltas(F3, prompt, output, skip)) == expected


F4_IDS = st.lists(
    st.one_of(
        st.integers(0, F4.vocab_size + 3),
        st.sampled_from(f4_byte_ids(EMOJI + "\ufffdé ".encode() + b"\xe0\xed\xf4\x80\x9f\xa0")),
        st.integers(len(F4_SPECIALS) + 256, len(F4_SPECIALS) + 256 + len(F4_PIECES) - 1),
    ),
    max_size=24,
)


def spelled_out(prompt: list[int], output: list[int], skip: bool) -> str:
    """The rule for byte fallback, over the whole sequence at once: each character with who owns it."""
    owned = [(i, True) for i in prompt] + [(i, False) for i in output]
    hidden = F4.all_special_ids if skip else frozenset()
    tokens = [(F4.token(i), is_prompt) for i, is_prompt in owned if i < F4.vocab_size and i not in hidden]
    characters: list[tuple[str, bool]] = []
    while tokens:
        for n in range(4, 0, -1):
            spelled = tokens[:n]
            if len(spelled) == n and all(token.startswith("<0x") for token, _ in spelled):
                data = bytes(int(token[3:5], 16) for token, _ in spelled)
                if _is_character(data):
                    characters.append((data.decode(), spelled[-1][1]))
                    break
        else:
            n = 1
            token, is_prompt = tokens[0]
            text = "\ufffd" if token.startswith("<0x") else token.replace("▁", " ")
            characters += [(character, is_prompt) for character in text]
        tokens = tokens[n:]
    if characters and characters[0][0] == " ":
        del characters[0]  # Strip(left=1)
    return "".join(character for character, is_prompt in characters if not is_prompt)


@given(prompt=F4_IDS, output=F4_IDS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_fallback_follows_the_rule(prompt: list[int], output: list[int], skip: bool) -> None:
    """For any ids: whole characters, one U+FFFD for each byte of none, the pieces in the context of the prompt."""
    assert "".join(deltas(F4, prompt, output, skip)) == spelled_out(prompt, output, skip)


def pieces_tokenizer(vocabulary: Sequence[str], decoder: Any) -> Tokenizer:
    """A tokenizer with nothing to it but a decoder."""
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, "[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, TokenizerSettings({}, None, None))


WORDS = ("[UNK]", "[PAD]", "a", "b", "##b", "##ing", "▁a", "▁", "a</w>", "b</w>", "|", ".", "'s", "n't", "do")
DECODERS = {
    "none": None,
    "WordPiece": decoders.WordPiece("##", cleanup=True),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, never a space before": decoders.Metaspace(prepend_scheme="never"),
    "BPE": decoders.BPEDecoder(),
    "CTC": decoders.CTC("[PAD]", "|", cleanup=True),
    "Sequence": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
}
WITH_PIECES = {name: pieces_tokenizer(WORDS, decoder) for name, decoder in DECODERS.items()}
WORD_IDS = st.lists(st.integers(0, len(WORDS) - 1), max_size=12)


@pytest.mark.parametrize("name", DECODERS)
@given(prompt=WORD_IDS, output=WORD_IDS)
@settings(max_examples=60, deadline=None)
def test_other_decoders_equal_one_shot_decoding(name: str, prompt: list[int], output: list[int]) -> None:
    """Decoders that look at the neighbours of a token: the text of prompt and output, less that of the prompt."""
    tokenizer = WITH_PIECES[name]
    head, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    assert whole.startswith(head)
    assert "".join(deltas(tokenizer, prompt, output)) == whole[len(head) :]


MIXED_BACKEND = f3_backend()
MIXED_BACKEND.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("Z", "z")])
MIXED = wrap(MIXED_BACKEND)


@given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), max_size=20), st.data())
@settings(deadline=None)
def test_byte_level_among_other_steps(text: str, data: st.DataObject) -> None:
    """A decoder that is byte-level and more shows whole characters too, across the end of the prompt as well."""
    ids = list(text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    shown = deltas(MIXED, ids[:cut], ids[cut:])
    expected = text.replace("Z", "z")
    before = len(ids[:cut]) and len(bytes(ids[:cut]).decode("utf-8", errors="ignore"))
    assert "".join(shown) == expected[before:]
    assert all("\ufffd" not in piece for piece in shown)


PIECES = ("😀", "é", "\ufffd", "Z", "<tool>", "<|stop|>")
BROKEN_IDS = st.one_of(
    st.sampled_from(PIECES).flatmap(lambda piece: st.integers(1, 4).map(lambda n: list(piece.encode())[:n])),
    st.sampled_from(PIECES).map(lambda piece: F3.encode(piece)),
    st.integers(0, F3.vocab_size).map(lambda token_id: [token_id]),
)


@given(st.lists(BROKEN_IDS, max_size=4), st.lists(BROKEN_IDS, max_size=6), st.booleans())
@settings(deadline=None)
def test_broken_characters_of_byte_level_among_other_steps(
    prompt: list[list[int]], output: list[list[int]], skip: bool
) -> None:
    """Of bytes that are no characters it shows, token by token, what plain byte-level decoding does."""
    ids, shown_ids = [id for ids in prompt for id in ids], [id for ids in output for id in ids]
    plain = [piece.replace("Z", "z") for piece in deltas(F3, ids, shown_ids, skip)]
    assert deltas(MIXED, ids, shown_ids, skip) == plain


# ---- what counts as text -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|stop|>b")])
def test_special_tokens_are_shown_on_demand(skip: bool, text: str) -> None:
    """Special tokens have text only with skip_special_tokens=False."""
    stop = F3.special_id("<|stop|>")
    assert stop is not None
    assert "".join(deltas(F3, [], [ord("a"), stop, ord("b")], skip)) == text


def test_added_tokens_that_are_not_special_are_shown() -> None:
    """An added token that is not special is text like any other."""
    tool = F3.special_id("<tool>")
    assert tool is not None
    assert deltas(F3, [], [tool]) == ["<tool>", ""]


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    """An id that the tokenizer does not have shows nothing and does not break up a character around it."""
    assert deltas(F3, [], [EMOJI[0], 10**6, *EMOJI[1:], -1]) == ["", "", "", "", "😀", "", ""]


def test_first_piece_of_the_output_keeps_its_space() -> None:
    """After a prompt with text, the output's first word is not the first of the text: its space is shown."""
    prompt, output = F4.encode("ab in"), F4.encode("ab", add_special_tokens=False)
    assert F4.token(output[0]) == "▁ab"
    assert deltas(F4, prompt, output) == [" ab", ""]
    assert deltas(F4, [], output) == ["ab", ""]


# ---- cost ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokenizer", [F3, F4, MIXED], ids=["F3", "F4", "byte-level and more"])
def test_long_outputs_decode_a_few_tokens_at_a_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 tokens, genuine and broken characters among them, after a long prompt: no decoding of more than 8 at once."""
    longest = calls = 0
    decode = tokenizer.decode

    def counting(ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest, calls
        longest, calls = max(longest, len(ids)), calls + 1
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    unit = "ab \ufffd\ufffd😀".encode() + b"\xf0\x9f\x98" * 3
    data = (unit * (10_000 // len(unit) + 1))[:10_000]
    ids = f4_byte_ids(data) if tokenizer is F4 else list(data)
    shown = deltas(tokenizer, ids, ids)
    assert "".join(shown).count("😀") == data.count(EMOJI)
    assert longest <= 8
    assert calls <= 2 * len(ids) + 20
