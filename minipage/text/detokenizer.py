"""Turns tokens into text one by one, never showing half a character and never taking back what was shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_GENUINE = REPLACEMENT.encode()  # a text may spell out U+FFFD as a character of its own
_PROMPT_WINDOW = 8  # prompt tokens that can matter: those of a begun character (3 at most), and some before it


class Detokenizer:
    """The text of one sequence's output, as it becomes certain.

    The rule, whatever the decoder: ``push(...)`` joined, and ``finish()``, is the text of prompt and output decoded in one
    go, less the text of the prompt. Tokens without text (ids outside the vocabulary, special ones if they are skipped)
    count as if they were not there.

    A character whose bytes begin in the prompt and end in the output belongs to the output. Bytes that are no character
    become U+FFFD as soon as that is certain, and belong to where they begin:

    * byte-level decoding: one U+FFFD for each maximal part of a character (Unicode 16, section 3.9), as the library has it;
    * byte fallback (``<0xF0>``): one for each byte, as the library has it for a run of nothing but such bytes. (In one go the
      library gives up the good characters of a run too, once a bad byte is in it. A stream has shown them by then.)

    A push costs O(1) amortised: no more than a few tokens are decoded together.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._hidden = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._text: _Text = _Bytes(tokenizer) if tokenizer.decoder_steps == ("ByteLevel",) else _Pieces(tokenizer)
        visible = (token_id for token_id in reversed(prompt_token_ids) if self._has_text(token_id))
        for token_id in reversed(list(islice(visible, _PROMPT_WINDOW))):
            self._text.push(token_id)
        self._text.end_prompt()

    def push(self, token_id: int) -> str:
        """Take the next token of the output; returns the text that is certain now, often ``""``."""
        return self._text.push(token_id) if self._has_text(token_id) else ""

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return self._text.finish()

    def _has_text(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size and token_id not in self._hidden


class _Text(Protocol):
    def push(self, token_id: int) -> str: ...

    def end_prompt(self) -> None:
        """What was pushed so far is the prompt."""

    def finish(self) -> str: ...


class _Bytes:
    """Byte-level decoding: each token is some bytes, and the text is UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rest = b""  # the beginning of a character
        self._begun_in_prompt = False

    def push(self, token_id: int) -> str:
        data = self._rest + self._tokenizer.token_bytes(token_id)
        text, self._rest = _whole_characters(data)
        if text and self._begun_in_prompt:
            self._begun_in_prompt = False
            if text[0] == REPLACEMENT and not data.startswith(_GENUINE):
                return text[1:]
        return text

    def end_prompt(self) -> None:
        self._begun_in_prompt = bool(self._rest)

    def finish(self) -> str:
        is_broken = self._rest and not self._begun_in_prompt
        self._rest = b""
        return REPLACEMENT if is_broken else ""


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text of UTF-8 bytes up to a character that may go on after them, and that character's bytes so far.

    (Python's incremental decoder waits too long: it takes the bytes of a surrogate, ED A0, for the beginning of something.)
    """
    if data.isascii():
        return data.decode("ascii"), b""
    for length in (1, 2, 3):
        try:
            data[-length:].decode("utf-8")
        except UnicodeDecodeError as failure:
            if failure.reason == "unexpected end of data" and failure.start == 0:
                return data[:-length].decode("utf-8", errors="replace"), data[-length:]
    return data.decode("utf-8", errors="replace"), b""


class _Pieces:
    """Any other decoder: each token is a piece of text that depends on the one before it, or one byte of a character.

    ``context`` is what was decoded last, ``shown`` the text that it has by itself: what a token adds is what the two decoded
    together have more. ``pending`` are tokens that may be part of a character that is not complete yet; with byte-level decoding
    the last token of ``context`` may begin it, and ``shown`` is without the U+FFFD that stands for it then.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_fallback = "ByteFallback" in tokenizer.decoder_steps
        self._is_byte_level = "ByteLevel" in tokenizer.decoder_steps  # among other steps: any token may end
        self._rest = b""  # within a character, of which these are the bytes so far
        self._begun_in_prompt = False
        self._context: list[int] = []
        self._shown = ""
        self._pending: list[int] = []
        self._pending_bytes = b""
        self._begun = 0  # how many of the pending bytes are the prompt's

    def push(self, token_id: int) -> str:
        byte = _fallback_byte(self._tokenizer.token(token_id)) if self._has_fallback else None
        return self._push_piece(token_id) if byte is None else self._push_byte(token_id, byte)

    def end_prompt(self) -> None:
        self._begun = len(self._pending_bytes)
        self._begun_in_prompt = bool(self._rest)

    def finish(self) -> str:
        if self._pending_bytes:
            return self._give_up_bytes()
        is_broken = self._rest and not self._begun_in_prompt
        self._rest = b""
        return REPLACEMENT if is_broken else ""

    def _push_piece(self, token_id: int) -> str:
        if self._is_byte_level:
            return self._push_bytes(token_id, self._tokenizer.token_bytes(token_id))
        broken = self._give_up_bytes() if self._pending_bytes else ""
        text = self._added([token_id])
        self._decoded([token_id])
        return broken + text

    def _push_bytes(self, token_id: int, added: bytes) -> str:
        data, unit = self._rest + added, [*self._pending, token_id]
        _, self._rest = _whole_characters(data)
        if len(self._rest) > len(added):  # all that is new goes on with the character
            self._pending = unit
            return ""
        held = 1 if self._rest else 0  # a U+FFFD, for a character that this token begins
        text = self._added(unit)
        text = text[: len(text) - held]
        self._decoded([token_id] if held else unit)
        self._shown = self._shown[: len(self._shown) - held]
        if text and self._begun_in_prompt:
            self._begun_in_prompt = False
            if text[0] == REPLACEMENT and not data.startswith(_GENUINE):
                return text[1:]
        return text

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        text = ""
        while True:
            data = self._pending_bytes + byte
            unit = [*self._pending, token_id]
            try:
                character = data.decode("utf-8")
            except UnicodeDecodeError as failure:
                if failure.reason == "unexpected end of data":
                    self._pending, self._pending_bytes = unit, data
                    return text
                if not self._pending:
                    self._decoded(unit)
                    return text + REPLACEMENT
                text += self._give_up_bytes()  # and try the byte as the beginning of another character
            else:
                if not self._context:  # the first character of all may be treated differently
                    character = self._added(unit)
                self._decoded(unit)
                return text + character

    def _give_up_bytes(self) -> str:
        broken = REPLACEMENT * (len(self._pending_bytes) - self._begun)
        self._decoded(self._pending)
        return broken

    def _added(self, unit: list[int]) -> str:
        return self._decode([*self._context, *unit])[len(self._shown) :]

    def _decoded(self, unit: list[int]) -> None:
        self._context, self._shown = unit, self._decode(unit)
        self._pending, self._pending_bytes, self._begun = [], b"", 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _fallback_byte(token: str) -> bytes | None:
    """The byte that a token ``<0x0A>`` stands for."""
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None
