"""Rebuilds a tokenizer from the vocabulary in a GGUF file's metadata.

Two models are known: ``gpt2``, byte-level BPE with merges, whose ``pre`` names how a text is split before merging; and
``llama``, SentencePiece's BPE (Kudo and Richardson 2018), which has no merges but a score for each piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelLoadError
from .tokenizer_files import TokenizerSettings, backend_errors

#: Values of ``tokenizer.ggml.token_type``.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

MAX_PIECE_LENGTH = 1024  #: many times what SentencePiece makes

_SPACE = "▁"  # how SentencePiece writes a space

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: ``tokenizer.ggml.pre`` -> the patterns that a text is split by, one after the other, into matches and what is between.
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_WORDS,),
    "llama-bpe": (_LLAMA3_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
}
MODELS = ("gpt2", "llama")


def build_backend(vocabulary: Mapping[str, Any]) -> Any:
    """A ``tokenizers.Tokenizer`` from GGUF metadata ``tokenizer.ggml.*``.

    Raises ModelLoadError naming the key that is missing or wrong, and what is allowed.
    """
    model = vocabulary.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise ModelLoadError(f"tokenizer.ggml.model={model!r} is not supported; allowed: {', '.join(MODELS)}")
    tokens = _list(vocabulary, "tokens", str)
    if not tokens:
        raise ModelLoadError("tokenizer.ggml.tokens is empty; it must hold the whole vocabulary")
    types = _token_types(vocabulary, model, tokens)
    with backend_errors(ModelLoadError, "the GGUF file's vocabulary is not valid"):
        backend = _byte_level(vocabulary, tokens) if model == "gpt2" else _sentence_piece(vocabulary, tokens, types)
        _add_added_tokens(backend, tokens, types)
        _add_post_processor(backend, vocabulary, tokens)
    return backend


def read_vocabulary_settings(vocabulary: Mapping[str, Any]) -> tuple[TokenizerSettings, tuple[int, ...]]:
    """Settings, and all ids that end a generation (end of text, of turn, of message), from GGUF metadata."""
    tokens = _list(vocabulary, "tokens", str)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(vocabulary, key, tokens) for name, key in names.items()}
    template = vocabulary.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"tokenizer.chat_template is {type(template).__name__}; it must be a string")
    settings = TokenizerSettings(
        special_tokens={name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        chat_template=template,
        add_bos=_adds(vocabulary, "bos"),
    )
    ends = (_token_id(vocabulary, key, tokens) for key in ("eos", "eot", "eom"))
    return settings, tuple(token_id for token_id in ends if token_id is not None)


# ---- the two models ------------------------------------------------------------------------------------------------------
def _byte_level(vocabulary: Mapping[str, Any], tokens: list[str]) -> Any:
    pre = vocabulary.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ModelLoadError(f"tokenizer.ggml.pre={pre!r} is not supported; allowed: {', '.join(SPLITS)}")
    texts = _list(vocabulary, "merges", str)
    cuts = [text.find(" ", 1) for text in texts]  # the left half has at least one character
    merges = [(text[:cut], text[cut + 1 :]) if cut > 0 else (text, "") for text, cut in zip(texts, cuts, strict=True)]
    backend = tokenizers.Tokenizer(models.BPE(_ids(tokens), merges, ignore_merges=pre == "llama-bpe"))
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: Mapping[str, Any], tokens: list[str], types: list[int]) -> Any:
    scores = _list(vocabulary, "scores", (float, int))
    if len(scores) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = _token_id(vocabulary, "unknown", tokens)
    model = models.BPE(
        _ids(tokens),
        _merges_from_scores(tokens, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(vocabulary, "add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges that build each piece from two others, best score first.

    SentencePiece merges whichever neighbours make the piece of the best score, which is BPE with merges in that order.
    Only normal pieces take part: the others are found in the text beforehand, or stand for bytes.
    """
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    longest = max(map(len, normal), default=0)
    if longest > MAX_PIECE_LENGTH:  # each is taken apart at every character
        raise ModelLoadError(
            f"tokenizer.ggml.tokens has a normal token of {longest} characters; at most {MAX_PIECE_LENGTH} are allowed"
        )
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(left, right) for _, left, right in merges]


# ---- what both have ------------------------------------------------------------------------------------------------------
def _add_added_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Control tokens (unknown ones too) and user-defined ones are found in a text before anything else."""
    kinds = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    added = [
        tokenizers.AddedToken(token, special=kinds[kind], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_post_processor(backend: Any, vocabulary: Mapping[str, Any], tokens: list[str]) -> None:
    ids = {}
    for name in ("bos", "eos"):
        if _adds(vocabulary, name):
            token_id = _token_id(vocabulary, name, tokens)
            if token_id is None:
                raise ModelLoadError(f"tokenizer.ggml.{name}_token_id is missing; add_{name}_token needs it")
            ids[name] = token_id
    if ids:
        names = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ids]
        special = [{"id": name, "ids": [token_id], "tokens": [tokens[token_id]]} for name, token_id in ids.items()]
        backend.post_processor = processors.TemplateProcessing(single=names, special_tokens=special)


def _adds(vocabulary: Mapping[str, Any], name: str) -> bool:
    """Whether a text gets a BOS or EOS. Where the file does not say: a BOS for ``llama`` and for the ``llama-bpe`` split."""
    starts = vocabulary.get("tokenizer.ggml.model") == "llama" or vocabulary.get("tokenizer.ggml.pre") == "llama-bpe"
    return _flag(vocabulary, f"add_{name}_token", default=name == "bos" and starts)


def _token_types(vocabulary: Mapping[str, Any], model: str, tokens: list[str]) -> list[int]:
    """The type of each token; where the file has none, all are normal but bytes, BOS, EOS and unknown."""
    if "tokenizer.ggml.token_type" in vocabulary:
        types = _list(vocabulary, "token_type", int)
        if len(types) != len(tokens):
            raise ModelLoadError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        return types
    types = [NORMAL] * len(tokens)
    if model == "llama":
        byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
        types = [BYTE if token in byte_tokens else NORMAL for token in tokens]
    for name, kind in (("unknown", UNKNOWN), ("bos", CONTROL), ("eos", CONTROL)):
        token_id = _token_id(vocabulary, name, tokens)
        if token_id is not None:
            types[token_id] = kind
    return types


def _ids(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of tokens that are spelled alike, the first is the one that a text is encoded to."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _token_id(vocabulary: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    """The id under ``tokenizer.ggml.{name}_token_id``; where the file has none, SentencePiece's own for ``llama``."""
    key = f"tokenizer.ggml.{name}_token_id"
    by_default = {"unknown": 0, "bos": 1, "eos": 2} if vocabulary.get("tokenizer.ggml.model") == "llama" else {}
    value = vocabulary.get(key, by_default.get(name) if len(tokens) > 2 else None)
    if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
        raise ModelLoadError(f"{key}={value!r} is not allowed; it must be from 0 to {len(tokens) - 1}")
    return value


def _flag(vocabulary: Mapping[str, Any], name: str, default: bool) -> bool:
    value = vocabulary.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"tokenizer.ggml.{name}={value!r} is not allowed; it must be true or false")
    return value


def _list(vocabulary: Mapping[str, Any], name: str, kind: Any) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    value = vocabulary.get(key)
    if not isinstance(value, (list, tuple)):
        raise ModelLoadError(f"{key} is {'missing' if value is None else type(value).__name__}; it must be a list")
    wrong = tuple(found for found in set(map(type, value)) if not issubclass(found, kind))
    if wrong:
        index, item = next((index, item) for index, item in enumerate(value) if isinstance(item, wrong))
        raise ModelLoadError(f"{key}[{index}]={item!r} is {type(item).__name__}, which is not allowed there")
    return list(value)
