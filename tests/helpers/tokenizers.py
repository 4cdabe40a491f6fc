"""Two small tokenizers for tests: F3, byte-level BPE; and F4, SentencePiece's kind with byte fallback.

Each is made as a backend (``tokenizers.Tokenizer``), which :func:`wrap` turns into minipage's and :func:`write_tokenizer`
writes as the files of a Hugging Face folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from minipage.text.tokenizer import Tokenizer

#: F3: id = byte for the first 256, then merges, then added tokens.
F3_MERGES = (("a", "b"), ("i", "n"), ("in", "j"), ("Ġ", "a"), ("ð", "Ł"))
F3_SPECIALS = ("<|bos|>", "<|endoftext|>", "<|stop|>")
F3_PLAIN_ADDED = ("<tool>", "<｜two words｜>")

#: F4: 0 to 2, then one token a byte, then pieces.
F4_SPECIALS = ("<unk>", "<s>", "</s>")
F4_PIECES = ("▁", *"abcdefghijklmnopqrstuvwxyz.,!?<>|/", "ab", "▁a", "▁ab", "in", "▁in", "é")
F4_MERGES = (("a", "b"), ("▁", "ab"), ("▁", "a"), ("i", "n"), ("▁", "in"))


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(rest)}}
    return [table[byte] for byte in range(256)]


def f3_backend(*, adds_bos: bool = False, adds_eos: bool = False, specials: Sequence[str] = F3_SPECIALS) -> Any:
    """F3. ``adds_bos`` and ``adds_eos`` are about plain text; the first special is BOS, the second EOS."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    for left, right in F3_MERGES:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, list(F3_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in specials])
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in F3_PLAIN_ADDED])
    _add_template(backend, specials[0] if adds_bos else None, specials[1] if adds_eos else None)
    return backend


def f4_backend(*, adds_bos: bool = False, adds_eos: bool = False) -> Any:
    """F4, as Llama 2 and Mistral have it: a space before the text, ``▁`` for spaces, bytes for what is not in the vocabulary."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: index for index, token in enumerate([*F4_SPECIALS, *byte_tokens, *F4_PIECES])}
    model = models.BPE(vocabulary, list(F4_MERGES), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in F4_SPECIALS])
    _add_template(backend, "<s>" if adds_bos else None, "</s>" if adds_eos else None)
    return backend


def f4_byte_ids(data: bytes) -> list[int]:
    """The ids of F4's byte tokens."""
    return [len(F4_SPECIALS) + byte for byte in data]


def special_names(backend: Any) -> dict[str, str]:
    """BOS and EOS of F3 and F4."""
    texts = F3_SPECIALS if backend.token_to_id(F3_SPECIALS[0]) is not None else F4_SPECIALS[1:]
    return {"bos_token": texts[0], "eos_token": texts[1]}


def wrap(
    backend: Any, *, chat_template: str | None = None, add_bos: bool | None = None, eos: Iterable[int] = ()
) -> Tokenizer:
    """minipage's tokenizer over a backend."""
    from minipage.text.tokenizer import Tokenizer
    from minipage.text.tokenizer_files import TokenizerSettings

    return Tokenizer(backend, TokenizerSettings(special_names(backend), chat_template, add_bos), eos)


def write_tokenizer(folder: Path, backend: Any, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json (with ``config`` in it) into ``folder``, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**special_names(backend), **config}), encoding="utf-8")
    return folder


def _add_template(backend: Any, bos: str | None, eos: str | None) -> None:
    parts = [part for part in (bos, "$A", eos) if part is not None]
    if len(parts) > 1:
        special = [(text, backend.token_to_id(text)) for text in (bos, eos) if text is not None]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
