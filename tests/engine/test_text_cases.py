"""Ways in which text has been wrong elsewhere: scripted models with tiny tokenizers, streamed and in one go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import models, tokenizers
from helpers.checks import assert_idle_and_whole, greedy_params
from helpers.scripted import BOS, END, START, STOP, OpenScript, V, say, serve

from minipage import LLM, SamplingParams

# ---- characters of several tokens --------------------------------------------------------------------------------------

KINDS = ["byte-level", "byte fallback"]


def kind(name: str) -> tuple[Any, Callable[[bytes], list[int]], int]:
    """A tokenizer, how it spells UTF-8 without merging anything, and its EOS."""
    if name == "byte-level":
        return tokenizers.f3_backend(), list, END
    backend = tokenizers.f4_backend()

    def spell(data: bytes) -> list[int]:
        pieces = (backend.token_to_id(chr(byte)) if byte < 128 else None for byte in data)
        return [tokenizers.f4_byte_ids(data)[i] if piece is None else piece for i, piece in enumerate(pieces)]

    return backend, spell, backend.token_to_id("</s>")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("a😀é".encode(), ["a", "😀", "é"]),
        ("x\ufffd".encode(), ["x", "\ufffd"]),
        (b"\x98ab", ["\ufffd", "a", "b"]),
        (b"\xf0a", ["\ufffda"]),
        ("漢".encode() + b"z", ["漢", "z"]),
    ],
)
def test_no_half_characters(open_script: OpenScript, name: str, data: bytes, pieces: list[str]) -> None:
    """Each character comes whole and once, a genuine U+FFFD too, and a stray byte as U+FFFD before what follows it."""
    backend, spell, end = kind(name)
    start = spell(b"^")[0]
    llm = open_script([start, *spell(data), end], backend=backend)
    out, found = serve(llm, [start], SamplingParams(temperature=0, max_tokens=20))
    assert found == pieces
    assert out.outputs[0].text == "".join(pieces)
    assert out.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("name", KINDS)
def test_character_cut_by_max_tokens(open_script: OpenScript, name: str) -> None:
    """A character that max_tokens cuts is what decoding in one go makes of it, once, at the end."""
    backend, spell, _ = kind(name)
    start = spell(b"^")[0]
    llm = open_script([start, *spell("a😀".encode())], backend=backend)
    out, found = serve(llm, [start], greedy_params(4))
    assert out.outputs[0].text == backend.decode([start, *out.outputs[0].token_ids]).removeprefix("^")
    assert out.outputs[0].text.rstrip("\ufffd") == "a"
    assert found[0] == "a" and len(found) == 2


@pytest.mark.parametrize("name", KINDS)
def test_prompt_ends_within_a_character(open_script: OpenScript, name: str) -> None:
    """What the prompt began belongs to the output once it is whole; nothing of the prompt before it is streamed again."""
    backend, spell, end = kind(name)
    smile = spell("😀".encode())
    llm = open_script([*smile, *spell("é".encode()), end], backend=backend)
    out, found = serve(llm, [*spell(b"hello "), *smile[:2]], SamplingParams(temperature=0, max_tokens=20))
    assert found == ["😀", "é"]
    assert out.outputs[0].text == "😀é"


# ---- one BOS -----------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "prints BOS": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}",
    "prints none": "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}",
}
MESSAGES = [{"role": "user", "content": "a<|bos|>b<|endoftext|>"}]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("adds", [(), ("bos",), ("eos",), ("bos", "eos")], ids=str)
def test_one_bos(tmp_path: Path, adds: tuple[str, ...], template: str) -> None:
    """A chat has exactly one BOS and no EOS; raw text gets what the tokenizer adds; ids are never changed."""
    backend = tokenizers.f3_backend(adds_bos="bos" in adds, adds_eos="eos" in adds)
    tokenizer = tokenizers.write_tokenizer(tmp_path / "tokenizer", backend, chat_template=TEMPLATES[template])
    folder = models.script_model(tmp_path / "model", models.script_table(V, [START, END]), tokenizer=tokenizer)
    with LLM(str(folder), device="cpu", dtype="float32", block_size=4, num_blocks=64) as llm:
        [chat] = llm.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)
        assert chat.prompt_token_ids[0] == BOS
        assert chat.prompt_token_ids.count(BOS) == 1
        assert END not in chat.prompt_token_ids
        text = "[user]a<|bos|>b<|endoftext|>"
        assert chat.prompt == ("<|bos|>" + text if template == "prints BOS" else text)
        assert backend.decode(chat.prompt_token_ids[1:], skip_special_tokens=False) == text

        [raw] = llm.generate("abc", SamplingParams(max_tokens=1), use_tqdm=False)
        assert raw.prompt == "abc"
        assert raw.prompt_token_ids == backend.encode("abc").ids
        assert (raw.prompt_token_ids[0] == BOS, raw.prompt_token_ids[-1] == END) == ("bos" in adds, "eos" in adds)

        [ids] = llm.generate([[BOS, BOS, 97, END]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert ids.prompt_token_ids == [BOS, BOS, 97, END]
        assert ids.prompt is None
        assert_idle_and_whole(llm)


def test_rendered_text_with_a_second_bos(tmp_path: Path) -> None:
    """A text that begins with BOS already, for a tokenizer that adds one, is encoded as told, with a warning about the two."""
    tokenizer = tokenizers.write_tokenizer(tmp_path / "tokenizer", tokenizers.f3_backend(adds_bos=True))
    folder = models.script_model(tmp_path / "model", models.script_table(V, [START, END]), tokenizer=tokenizer)
    with LLM(str(folder), device="cpu", dtype="float32", block_size=4, num_blocks=64) as llm:
        with pytest.warns(UserWarning, match="BOS twice"):
            [out] = llm.generate("<|bos|>abc", SamplingParams(max_tokens=1), use_tqdm=False)
        assert out.prompt_token_ids[:2] == [BOS, BOS]
        assert_idle_and_whole(llm)


# ---- ids that the tokenizer does not have ------------------------------------------------------------------------------


def test_padded_vocabulary(open_script: OpenScript) -> None:
    """Ids of the model beyond the tokenizer's can be said and heard; they have no text and disturb nothing."""
    size = tokenizers.f3_backend().get_vocab_size()
    assert size < V - 2
    llm = open_script([START, ord("a"), V - 1, ord("b"), V - 2, END])
    out, found = serve(llm, [START], SamplingParams(temperature=0, max_tokens=20, logprobs=1))
    assert list(out.outputs[0].token_ids) == [ord("a"), V - 1, ord("b"), V - 2, END]
    assert (out.outputs[0].text, found) == ("ab", ["a", "b"])
    out, _ = serve(llm, [V - 1], SamplingParams(temperature=0, max_tokens=20))
    assert out.outputs[0].text == "b"
    with pytest.raises(ValueError, match=str(V)):
        llm.generate([[V]], SamplingParams(), use_tqdm=False)


def test_tokens_beyond_the_model(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model: a text with one of these is refused, and nothing is read for it."""
    backend = tokenizers.f3_backend()
    template = "{% for message in messages %}{{ message.content }}<|stop|>{% endfor %}"
    tokenizer = tokenizers.write_tokenizer(tmp_path / "tokenizer", backend, chat_template=template, bos_token=None)
    folder = models.history_model(tmp_path / "model", 3, vocab_size=STOP, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=3, min_tokens=2, stop=["<|stop|>"])
    with LLM(str(folder), device="cpu", num_blocks=16) as llm:
        for text in ("<|stop|>", "ab<|stop|>"):
            with pytest.raises(ValueError, match=rf"token '<\|stop\|>', which is {STOP} .* from 0 to {STOP - 1}"):
                llm.generate(["a", text], params, use_tqdm=False)
        with pytest.raises(ValueError, match=str(STOP)):
            llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
        assert len(llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids) == 3
        assert_idle_and_whole(llm)


# ---- a request's text is its own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["a\ud83d", 5, None, {"text": "a"}, [["a"]], [1.5]], ids=repr)
def test_prompts_that_are_none(open_script: OpenScript, prompt: Any) -> None:
    """Half a surrogate pair, or no prompt at all, is one clear error; the engine serves on."""
    llm = open_script(say("abc"))
    with pytest.raises(ValueError):
        llm.generate(prompt, SamplingParams(max_tokens=3), use_tqdm=False)
    out, _ = serve(llm, "^", SamplingParams(temperature=0, max_tokens=5))
    assert out.outputs[0].text == "abc"
