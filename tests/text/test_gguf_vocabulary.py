"""Tokenizers rebuilt from GGUF metadata: how they split, how they merge, what they add, what they refuse."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from helpers.tokenizers import byte_characters
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from minipage.errors import ModelLoadError
from minipage.text.detokenizer import Detokenizer
from minipage.text.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, build_backend
from minipage.text.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
CORPUS = [
    "Once upon a time there were 1234 cats; they'd say: \"I'll pay $5,000 -- no more!\"",
    "def  f(x):\n    return x + 10\n\n\tcafé naïve 東京 😀😀",
]
TEXTS = st.text() | st.text("abc  '\n\t1234567.,$<é東😀stll")


def byte_level_vocabulary(pre: str | None = "smollm", **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary trained on a little text, as a GGUF file has it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=byte_characters(), show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = ["<|end|>", "<|start|>", "<think>", *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    vocabulary = {
        f"{KEY}model": "gpt2",
        f"{KEY}tokens": tokens,
        f"{KEY}token_type": [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3),
        f"{KEY}merges": [" ".join(merge) for merge in model["merges"]],
        f"{KEY}bos_token_id": 1,
        f"{KEY}eos_token_id": 0,
    }
    if pre is not None:
        vocabulary[f"{KEY}pre"] = pre
    return vocabulary | {KEY + name: value for name, value in more.items()}


PIECES = {
    "▁": -1.5, "t": -20, "h": -21, "e": -22, "o": -23, "n": -24, "c": -25, "u": -26, "p": -27, "s": -28, "a": -29,
    "th": -1, "▁th": -5, "▁the": -2, "he": -3, "on": -4, "▁on": -6, "ce": -7, "once": -8, "▁once": -9, "up": -10,
    "upon": -11, "▁u": -12, "pon": -13, "▁upon": -14, "the": -15,
    "<": -30, "0": -31, "x": -32, "4": -33, "1": -34, ">": -35, "<0": -16, "<0x": -17, "<0x4": -18, "1>": -19,
}  # fmt: skip


def sentence_piece_vocabulary(**more: Any) -> dict[str, Any]:
    """A vocabulary with scores and byte tokens, as the conversion of a Llama 2 model writes it."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|user|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    scores = [0.0] * 259 + [float(score) for score in PIECES.values()] + [0.0]
    vocabulary = {f"{KEY}model": "llama", f"{KEY}tokens": tokens, f"{KEY}token_type": types, f"{KEY}scores": scores}
    return vocabulary | {KEY + name: value for name, value in more.items()}


VOCABULARIES = {pre: byte_level_vocabulary(pre) for pre in ("smollm", "gpt-2", "llama-bpe", "default")}
TOKENIZERS = {pre: Tokenizer.from_gguf(vocabulary) for pre, vocabulary in VOCABULARIES.items()}


# ---- byte-level ----------------------------------------------------------------------------------------------------------
def splits(pre: str, text: str) -> list[str]:
    """The pieces of ``text``, in the byte-level spelling read back."""
    table = {character: byte for byte, character in enumerate(byte_characters())}
    backend = build_backend(byte_level_vocabulary(pre))
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [bytes(table[character] for character in piece).decode() for piece in pieces]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", "I|'ll| pay| $|1|2|3|4| |5|  | it|\n|\n|NOT|'|S| é|!?"),
        ("gpt-2", "I|'ll| pay| $|1234| 5|  | it|\n|\n|NOT|'|S| é|!?"),
        ("llama-bpe", "I|'ll| pay| $|123|4| |5|  | it|\n\n|NOT|'S| é|!?"),
        ("default", "I|'|ll| pay| |$|123|4| |5|  | it|\n|\n|NOT|'|S| é|!?"),
    ],
)
def test_each_pre_type_splits_in_its_way(pre: str, expected: str) -> None:
    """Contractions, digits, punctuation, line ends, capitals: each pre-type has its own idea."""
    assert "|".join(splits(pre, "I'll pay $1234 5   it\n\nNOT'S é!?")) == expected


HUGGING_FACE = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


@pytest.mark.parametrize("pre", HUGGING_FACE)
@given(text=TEXTS)
@settings(deadline=None)
def test_ids_are_those_of_the_hugging_face_tokenizer(pre: str, text: str) -> None:
    """The tokenizer.json that these models come with splits by other means, and gives the same ids."""
    vocabulary = VOCABULARIES[pre]
    ids = {token: i for i, token in enumerate(vocabulary[f"{KEY}tokens"])}
    merges = [tuple(merge.split(" ")) for merge in vocabulary[f"{KEY}merges"]]
    backend = tokenizers.Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(HUGGING_FACE[pre])
    assert TOKENIZERS[pre].encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("pre", VOCABULARIES)
@given(text=TEXTS)
@settings(deadline=None)
def test_byte_level_round_trip(pre: str, text: str) -> None:
    """Any text comes back, at once and token by token, but for the names of special tokens, which are not shown."""
    tokenizer = TOKENIZERS[pre]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.all_special_ids.isdisjoint(ids))
    assert tokenizer.decode(ids) == text
    detokenizer = Detokenizer(tokenizer, [])
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text


def test_llama_bpe_takes_whole_words_without_merging() -> None:
    """A word that is in the vocabulary is that token, even where merges would not lead to it; elsewhere merges decide."""
    for pre, expected in (("llama-bpe", 1), ("gpt-2", 2)):
        vocabulary = byte_level_vocabulary(pre)
        vocabulary[f"{KEY}tokens"].append("zq")
        vocabulary[f"{KEY}token_type"].append(NORMAL)
        assert len(Tokenizer.from_gguf(vocabulary).encode("zq", add_special_tokens=False)) == expected


def test_no_pre_type_is_the_default_one() -> None:
    """A file that does not name its pre-type is split in the default way."""
    tokenizer = Tokenizer.from_gguf(byte_level_vocabulary(None))
    assert tokenizer.encode("a $1234") == TOKENIZERS["default"].encode("a $1234")


def test_control_and_user_defined_tokens() -> None:
    """Both are found in a text; only control tokens are hidden."""
    tokenizer = TOKENIZERS["smollm"]
    ids = tokenizer.encode("a<|start|><think>b")
    assert ids[1:3] == [1, 2]
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.all_special_ids == {0, 1}


# ---- SentencePiece -------------------------------------------------------------------------------------------------------
def sentence_piece(text: str) -> list[str]:
    """SentencePiece's BPE, plainly: merge the two neighbours that make the piece of the best score, until none do."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        scores = [PIECES.get(left + right) for left, right in pairwise(symbols)]
        best = max((score for score in scores if score is not None), default=None)
        if best is None:
            break
        at = scores.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    spelled = ([symbol] if symbol in PIECES else [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols)
    return [token for tokens in spelled for token in tokens]


SENTENCE_PIECE = Tokenizer.from_gguf(sentence_piece_vocabulary())


@given(st.text("thonceups a") | st.text("<0x41>") | st.text())
@settings(deadline=None)
def test_merges_from_scores_give_sentence_pieces(text: str) -> None:
    """The merges rebuilt from scores lead to the pieces that merging by score does; other characters are bytes."""
    ids = SENTENCE_PIECE.encode(text, add_special_tokens=False)
    assert [SENTENCE_PIECE.token(token_id) for token_id in ids] == sentence_piece(text)
    assert SENTENCE_PIECE.decode(ids) == text.replace("▁", " ")


def test_byte_tokens_are_not_built_from_text() -> None:
    """A text that spells out a byte token does not become that byte."""
    ids = SENTENCE_PIECE.encode("<0x41>", add_special_tokens=False)
    assert [SENTENCE_PIECE.token(i) for i in ids] == ["▁", "<0x4", "1>"]


def test_space_prefix() -> None:
    """add_space_prefix=false: no space is put before a text, and none is taken off what is decoded."""
    tokenizer = Tokenizer.from_gguf(sentence_piece_vocabulary(add_space_prefix=False))
    assert [tokenizer.token(i) for i in tokenizer.encode("once upon", add_special_tokens=False)] == ["once", "▁upon"]
    assert tokenizer.decode(tokenizer.encode(" upon")) == " upon"


def test_a_text_after_a_control_token_gets_the_prefix_too() -> None:
    """As SentencePiece does for each stretch of text."""
    ids = SENTENCE_PIECE.encode("<|user|>once</s>once", add_special_tokens=False)
    assert [SENTENCE_PIECE.token(i) for i in ids] == ["<|user|>", "▁once", "</s>", "▁once"]


def test_types_are_guessed_where_the_file_has_none() -> None:
    """Without token_type, byte tokens are bytes, and BOS, EOS and unknown are control tokens."""
    vocabulary = sentence_piece_vocabulary()
    del vocabulary[f"{KEY}token_type"]
    tokenizer = Tokenizer.from_gguf(vocabulary)
    ids = tokenizer.encode("once</s>é")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "▁once", "</s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.all_special_ids == {0, 1, 2}


# ---- BOS, EOS and the rest -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("vocabulary", "adds"),
    [
        (byte_level_vocabulary("smollm"), (False, False)),
        (byte_level_vocabulary("llama-bpe"), (True, False)),
        (byte_level_vocabulary("llama-bpe", add_bos_token=False), (False, False)),
        (byte_level_vocabulary("smollm", add_bos_token=True, add_eos_token=True), (True, True)),
        (sentence_piece_vocabulary(), (True, False)),
        (sentence_piece_vocabulary(add_bos_token=False, add_eos_token=True), (False, True)),
    ],
)
def test_who_gets_a_bos(vocabulary: dict[str, Any], adds: tuple[bool, bool]) -> None:
    """The file's word counts; where it is silent, llama and llama-bpe get a BOS, others none, and none gets an EOS."""
    tokenizer = Tokenizer.from_gguf(vocabulary)
    ids = tokenizer.encode("the")
    assert (ids[0] == tokenizer.bos_token_id, ids[-1] in tokenizer.eos_token_ids) == adds
    assert tokenizer.add_bos is adds[0]


def test_all_ends_of_generation_count() -> None:
    """The ends of text, turn and message are EOS ids; the names go to the chat template, which comes along."""
    vocabulary = byte_level_vocabulary(eot_token_id=1, eom_token_id=2, unknown_token_id=0, padding_token_id=1)
    vocabulary["tokenizer.chat_template"] = "{{ messages }}"
    tokenizer = Tokenizer.from_gguf(vocabulary)
    assert tokenizer.eos_token_ids == (0, 1, 2)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.special_tokens == {
        "bos_token": "<|start|>", "eos_token": "<|end|>", "unk_token": "<|end|>", "pad_token": "<|start|>",
    }  # fmt: skip


def test_tokens_spelled_alike() -> None:
    """Of two tokens with the same text the first is used; the ids after them stay what they are."""
    vocabulary = byte_level_vocabulary()
    vocabulary[f"{KEY}tokens"] += ["a", "last"]
    vocabulary[f"{KEY}token_type"] += [NORMAL, CONTROL]
    tokenizer = Tokenizer.from_gguf(vocabulary)
    assert tokenizer.encode("a") == TOKENIZERS["smollm"].encode("a")
    assert tokenizer.special_id("last") == len(vocabulary[f"{KEY}tokens"]) - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported; allowed: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model=None is not supported"),
        ({"pre": "deepseek-v3"}, "pre='deepseek-v3' is not supported; allowed: default, gpt-2, llama-bpe, smollm"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": "abc"}, "tokens is str"),
        ({"tokens": ["a", 5]}, "tokens[1]=5 is int"),
        ({"tokens": []}, "tokens is empty"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a nowhere"]}, "nowhere"),
        ({"merges": ["ab"]}, "not valid"),
        ({"token_type": [1, 2]}, "token_type has 2 entries"),
        ({"bos_token_id": 10**6}, "bos_token_id=1000000 is not allowed; it must be from 0 to"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing; add_bos_token needs it"),
        ({"add_eos_token": "yes"}, "add_eos_token='yes' is not allowed"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.5]}, "scores has 1 entries"),
        (
            {"model": "llama", "tokens": ["a", "b", "a" * 50_000], "scores": [0.0, 0.0, 0.0]},
            "tokens has a normal token of 50000 characters; at most 1024 are allowed",
        ),
    ],
)
def test_a_bad_vocabulary_is_one_clear_error(changes: dict[str, Any], message: str) -> None:
    """The error names the key, what it is, and what is allowed."""
    vocabulary = byte_level_vocabulary(token_type=None, bos_token_id=0, eos_token_id=0)
    del vocabulary[f"{KEY}token_type"]
    vocabulary |= {KEY + name: value for name, value in changes.items()}
    if changes.get("tokens") == []:
        vocabulary[f"{KEY}merges"] = []
        del vocabulary[f"{KEY}bos_token_id"], vocabulary[f"{KEY}eos_token_id"]
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        Tokenizer.from_gguf(vocabulary)


def test_a_chat_template_must_be_a_string() -> None:
    """The error says what it is."""
    with pytest.raises(ModelLoadError, match="chat_template is int"):
        Tokenizer.from_gguf({**byte_level_vocabulary(), "tokenizer.chat_template": 5})
