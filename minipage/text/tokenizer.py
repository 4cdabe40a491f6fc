"""Text to token ids and back: a strict wrapper around a ``tokenizers.Tokenizer``, from either kind of checkpoint."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InvalidArgumentError, ModelLoadError
from .gguf_vocabulary import build_backend, read_vocabulary_settings
from .lookalikes import LookalikeGuard, is_turn_token
from .tokenizer_files import TokenizerSettings, backend_errors, read_backend, read_settings


class Tokenizer:
    """One checkpoint's tokenizer. Safe to use from several threads.

    It has no limit on the length of a text; ``longest_token`` lets a caller see beforehand that a text cannot fit.
    """

    def __init__(
        self,
        backend: Any,
        settings: TokenizerSettings,
        more_eos_ids: Iterable[int] = (),
        tokens: Sequence[str] | None = None,
    ) -> None:
        """``backend`` is a ``tokenizers.Tokenizer``; the tokens that ``settings`` call BOS and EOS become special in it.

        ``tokens`` are all that it has by their ids, if they are at hand: to ask it for them takes a while.
        """
        self._backend = backend
        self.special_tokens = settings.special_tokens  #: such as "bos_token" -> "<s>", for chat templates
        self.chat_template = settings.chat_template
        self.add_bos = settings.add_bos  #: whether the checkpoint says that a text gets a BOS; None: it does not say
        self.bos_token_id = self._make_special("bos_token")
        eos_token_id = self._make_special("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos_token_id is None else [eos_token_id]), *more_eos_ids]))
        if tokens is None:
            vocabulary = backend.get_vocab(with_added_tokens=True)
            tokens, self.vocab_size = list(vocabulary), max(vocabulary.values()) + 1  #: every id is below it
        else:
            self.vocab_size = len(tokens)
        self.longest_token = max(map(len, tokens))  #: characters of the longest entry, in the vocabulary's spelling
        added = backend.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        #: The steps of the decoder, such as ("ByteLevel",) or ("Replace", "ByteFallback", "Fuse", "Strip").
        self.decoder_steps = _decoder_steps(backend.decoder)
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[int, str] = {}
        #: Encodes a rendered chat so that control tokens that its messages spell out stay text.
        self.guard = LookalikeGuard(
            backend, [token.content for token in added.values() if token.special or is_turn_token(token.content)]
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face layout: tokenizer.json, and what may stand beside it.

        Raises ModelLoadError naming the file that is missing or wrong.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        backend, settings = read_backend(file), read_settings(folder)
        with backend_errors(ModelLoadError, f"{file} cannot be used"):
            return cls(backend, settings)

    @classmethod
    def from_gguf(cls, vocabulary: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file's ``tokenizer.*`` metadata describe. Raises ModelLoadError naming the key."""
        settings, eos_token_ids = read_vocabulary_settings(vocabulary)
        backend = build_backend(vocabulary)
        with backend_errors(ModelLoadError, "the GGUF file's vocabulary cannot be used"):
            return cls(backend, settings, eos_token_ids, vocabulary["tokenizer.ggml.tokens"])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; control tokens that it spells out become control tokens.

        ``add_special_tokens`` adds what the tokenizer adds to a plain text (BOS, EOS, both or none). Raises
        InvalidArgumentError where ``text`` is not a string or holds half a surrogate pair.
        """
        check_text("text", text)
        with backend_errors(InvalidArgumentError, "the text cannot be tokenised"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            warnings.warn(
                "the prompt begins with BOS twice: its text has one, and the tokenizer adds another", stacklevel=3
            )
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, as the library decodes them in one go; ids outside the vocabulary have no text."""
        ids = [int(token_id) for token_id in token_ids if 0 <= token_id < self.vocab_size]
        with backend_errors(InvalidArgumentError, "the token ids cannot be decoded"):
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text that one token adds in the middle of a text, special ones included; half a character is U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            before = self.decode(self._anchor, skip_special_tokens=False)
            text = self.decode([*self._anchor, token_id], skip_special_tokens=False)[len(before) :]
            self._token_texts[token_id] = text
        return text

    def token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token (such as ``Ġthe`` or ``<0x0A>``), ``""`` outside the vocabulary."""
        return (self._backend.id_to_token(int(token_id)) or "") if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in a byte-level vocabulary; an added token stands for its own UTF-8."""
        data = self._token_bytes.get(token_id)
        if data is None:
            token = self.token(token_id)
            spelled = [_BYTE_OF_CHARACTER.get(character, -1) for character in token]
            data = token.encode("utf-8") if -1 in spelled else bytes(spelled)
            self._token_bytes[token_id] = data
        return data

    def special_id(self, text: str) -> int | None:
        """The id of the added token (special or not) whose content is exactly ``text``."""
        return self._added_ids.get(text)

    @cached_property
    def _anchor(self) -> list[int]:
        """An ordinary token to decode others after, since a decoder may treat the first token of a text differently."""
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1:] if self.decode(ids[-1:]).endswith("a") else []

    def _make_special(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        token_id: int | None = None if content is None else self._backend.token_to_id(content)
        added = self._backend.get_added_tokens_decoder().get(token_id)
        if token_id is not None and not (added and added.special):
            self._backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
        return token_id


def check_text(name: str, text: object) -> None:
    """Raise InvalidArgumentError, naming ``name`` and the place, unless ``text`` is a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{name} must be a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        surrogate = ord(text[failure.start])
        raise InvalidArgumentError(
            f"{name} has half a surrogate pair, U+{surrogate:04X}, at character {failure.start}; it must be valid Unicode"
        ) from failure


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte: itself if it is printable Latin-1, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _decoder_steps(decoder: Any) -> tuple[str, ...]:
    if decoder is None:
        return ()
    state = json.loads(decoder.__getstate__())
    return tuple(step["type"] for step in (state["decoders"] if state["type"] == "Sequence" else [state]))
