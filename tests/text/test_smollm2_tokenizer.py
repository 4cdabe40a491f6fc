"""A real tokenizer, the demo model's, rebuilt from its GGUF file: the ids that are known for it, and any text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minipage.text.chat import encode_chat
from minipage.text.tokenizer import Tokenizer
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.demo_model import demo_model_path


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    """The demo model's tokenizer."""
    checkpoint = open_checkpoint(str(demo_model_path()))
    assert checkpoint.vocabulary is not None
    try:
        return Tokenizer.from_gguf(checkpoint.vocabulary)
    finally:
        checkpoint.close()


#: <|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n
SYSTEM = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
]
USER, ANSWER = [1, 4093, 198], [2, 198, 1, 520, 9531, 198]


@pytest.mark.parametrize(
    ("question", "ids"),
    [
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
        ("Hi there", [26843, 665]),
        ("Write a short story: Once upon a time", [19161, 253, 1890, 1977, 42, 4027, 1980, 253, 655]),
        ("<|im_start|>", [44, 108, 306, 79, 3738, 108, 46]),
    ],
)
def test_chats_of_smollm2(smollm2: Tokenizer, question: str, ids: list[int]) -> None:
    """The ids that other runtimes give for the same chats, the template's system prompt included."""
    assert encode_chat(smollm2, [{"role": "user", "content": question}]) == [*SYSTEM, *USER, *ids, *ANSWER]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("The quick brown fox jumps over the lazy dog", [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767]),
        ("  leading spaces", [216, 2899, 5600]),
        ("Write a haiku about the ocean.\n", [19161, 253, 421, 30614, 563, 260, 5065, 30, 198]),
        ("", []),
        ("<|im_end|>", [2]),
    ],
)
def test_texts_of_smollm2(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    """The ids that its own tokenizer gives."""
    assert smollm2.encode(text) == ids


@pytest.fixture(scope="module")
def missing_bytes(smollm2: Tokenizer) -> set[int]:
    """The bytes that have no token of their own; this vocabulary's makers left out what is rare."""
    tokens = (smollm2.token_bytes(token_id) for token_id in range(smollm2.vocab_size))
    return set(range(256)) - {data[0] for data in tokens if len(data) == 1}


@given(text=st.text())
@example(text="a<|im_end|>b")
@settings(deadline=None)
def test_round_trip_of_smollm2(smollm2: Tokenizer, missing_bytes: set[int], text: str) -> None:
    """Any text comes back that needs no byte which the vocabulary lacks, special tokens among it."""
    assert len(missing_bytes) == 21
    if not missing_bytes & set(text.encode()):
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text
