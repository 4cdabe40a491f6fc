"""Ways in which text and its end have been wrong elsewhere: scripted models with tiny tokenizers, streamed and in one go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref, tokenizers
from helpers.checks import assert_idle_and_whole, greedy_params

from minipage import LLM, RequestOutput, SamplingParams
from minipage.text.stop import StopFilter

V = 320  #: tokens of the scripted models: more than either tokenizer has
BOS, END, STOP = (tokenizers.f3_backend().token_to_id(text) for text in tokenizers.F3_SPECIALS)
START = ord("^")  #: the prompt of most scripts

OpenScript = Callable[..., LLM]


@pytest.fixture
def open_script(tmp_path: Path) -> Iterator[OpenScript]:
    """Opens an engine on a script model; afterwards it must be idle and whole."""
    opened: list[LLM] = []
    folders = (tmp_path / str(i) for i in itertools.count())

    def open_one(*chains: Sequence[int], backend: Any = None, generation_config: Any = None, **config: Any) -> LLM:
        folder = next(folders)
        tokenizer = tokenizers.write_tokenizer(folder / "tokenizer", backend or tokenizers.f3_backend())
        model = models.script_model(
            folder / "model",
            models.script_table(V, *chains),
            tokenizer=tokenizer,
            generation_config=generation_config,
            **config,
        )
        opened.append(LLM(str(model), device="cpu", dtype="float32", block_size=4, num_blocks=64))
        return opened[-1]

    yield open_one
    for llm in opened:
        assert_idle_and_whole(llm)
        llm.close()


def serve(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, list[str]]:
    """The final output and the pieces of text that were streamed, which are checked to agree with each other."""
    pieces, last = [], None
    for last in llm.stream(prompt, params):
        pieces.append(last.outputs[0].delta_text)
        assert "".join(pieces) == last.outputs[0].text
    assert last is not None and last.finished
    [whole] = llm.generate([prompt], params, use_tqdm=False)
    for streamed, at_once in zip(last.outputs, whole.outputs, strict=True):
        assert (streamed.text, streamed.token_ids, streamed.logprobs) == (
            at_once.text,
            at_once.token_ids,
            at_once.logprobs,
        )
        assert (streamed.finish_reason, streamed.stop_reason) == (at_once.finish_reason, at_once.stop_reason)
        if streamed.logprobs is not None:
            assert len(streamed.logprobs) == len(streamed.token_ids)
            chosen = (row[i].logprob for row, i in zip(streamed.logprobs, streamed.token_ids, strict=True))
            assert streamed.cumulative_logprob == pytest.approx(sum(chosen))
    return whole, [piece for piece in pieces if piece]


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


# ---- stops -------------------------------------------------------------------------------------------------------------


def say(text: str, *, then: Sequence[int] = (END,)) -> list[int]:
    """A chain from START through the bytes of ``text``, which may use each byte once."""
    return [START, *text.encode(), *then]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_stop_string_over_several_tokens(open_script: OpenScript, include: bool, logprobs: int | None) -> None:
    """A stop string of three tokens: the text ends before it (or after it), token ids and logprobs tell of all that was said."""
    llm = open_script(say("Hi! What?"))
    params = SamplingParams(
        temperature=0, max_tokens=20, stop=["Wha"], include_stop_str_in_output=include, logprobs=logprobs
    )
    out, found = serve(llm, [START], params)
    [output] = out.outputs
    assert output.text == ("Hi! Wha" if include else "Hi! ")
    assert list(output.token_ids) == list(b"Hi! Wha")
    assert (output.finish_reason, output.stop_reason) == ("stop", "Wha")
    assert not any("W" in piece for piece in found[:-1])


def test_stop_string_that_never_comes(open_script: OpenScript) -> None:
    """Text that looked like the beginning of a stop is released at the end, whatever ends the generation."""
    for max_tokens, reason in ((20, "stop"), (4, "length")):
        llm = open_script(say("abcd"))
        out, found = serve(llm, [START], SamplingParams(temperature=0, max_tokens=max_tokens, stop="cdx"))
        assert "".join(found) == out.outputs[0].text == "abcd"
        assert out.outputs[0].finish_reason == reason
        assert out.outputs[0].stop_reason is None


def test_earliest_stop_wins(open_script: OpenScript) -> None:
    """Of several stops the one that comes first in the text wins, whatever the order of the list."""
    for stops in itertools.permutations(["gh", "cd", "ef"]):
        out, _ = serve(
            open_script(say("abcdefgh")), [START], SamplingParams(temperature=0, max_tokens=20, stop=list(stops))
        )
        assert out.outputs[0].text == "ab"
        assert out.outputs[0].stop_reason == "cd"


def test_stops_are_prepared_once(open_script: OpenScript, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many completions look for them: as long as they may be, their tables would take gigabytes for 128."""
    added: list[str] = []
    add = StopFilter._add
    monkeypatch.setattr(StopFilter, "_add", lambda filter, stop: added.append(stop) or add(filter, stop))  # type: ignore[func-returns-value]
    llm = open_script(say("abcdefgh"))
    [out] = llm.generate(
        [[START]], SamplingParams(n=32, temperature=0, max_tokens=20, stop=["ef", "x"]), use_tqdm=False
    )
    assert [(output.text, output.stop_reason) for output in out.outputs] == [("abcd", "ef")] * 32
    assert sorted(added) == ["ef", "x"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_id(open_script: OpenScript, include: bool) -> None:
    """A stop token ends the output and is its last token; its text is left out unless it is asked for."""
    llm = open_script(say("abcd"))
    params = SamplingParams(
        temperature=0, max_tokens=20, stop_token_ids=[ord("c")], include_stop_str_in_output=include, logprobs=2
    )
    out, _ = serve(llm, [START], params)
    assert out.outputs[0].text == ("abc" if include else "ab")
    assert list(out.outputs[0].token_ids) == list(b"abc")
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", ord("c"))


def test_special_token_as_stop(open_script: OpenScript) -> None:
    """A special token that is hidden from the text stops as a string, as an id, or both, and cuts nothing off the text."""
    ways: list[dict[str, Any]] = [
        {"stop": "<|stop|>"},
        {"stop_token_ids": [STOP]},
        {"stop": ["<|stop|>"], "stop_token_ids": [STOP]},
    ]
    llm = open_script(say("injury.", then=[STOP, *b"xz", END]))
    for way, skip in itertools.product(ways, (True, False)):
        out, _ = serve(llm, [START], SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=skip, **way))
        assert out.outputs[0].text == "injury."
        assert list(out.outputs[0].token_ids) == [*b"injury.", STOP]
        assert out.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("skip", [True, False])
def test_special_token_that_is_no_stop(open_script: OpenScript, skip: bool) -> None:
    """A special token in the middle is shown or not, as asked, and the text goes on."""
    llm = open_script([START, *b"ab", STOP, *b"cd", END])
    out, _ = serve(llm, [START], SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=skip))
    assert out.outputs[0].text == ("abcd" if skip else "ab<|stop|>cd")


@pytest.mark.parametrize("stop", ["", ["", "a"], ["a", 5], [5], 5, [None]])
def test_stops_that_are_none(stop: Any) -> None:
    """An empty stop, or one that is no string, is refused by name."""
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("stop", [None, [], "d", ["d"]])
def test_stops_that_are_some(open_script: OpenScript, stop: Any) -> None:
    """No stop, no stops, one stop as a string or in a list."""
    out, _ = serve(open_script(say("abcde")), [START], SamplingParams(temperature=0, max_tokens=20, stop=stop))
    assert out.outputs[0].text == ("abc" if stop else "abcde")


# ---- the end of the model's own ----------------------------------------------------------------------------------------


@pytest.fixture
def open_ends(open_script: OpenScript) -> Callable[..., LLM]:
    """Opens a script whose config calls 5 an end, generation_config 5 and 6, and the tokenizer END."""

    def open_one(*chains: Sequence[int]) -> LLM:
        return open_script(*chains, eos_token_id=5, generation_config={"eos_token_id": [5, 6]})

    return open_one


@pytest.mark.parametrize("end", [5, 6, END])
def test_all_ends_end(open_ends: Callable[..., LLM], end: int) -> None:
    """Each id that config, generation_config or tokenizer calls an end is one; ignore_eos ignores them all."""
    llm = open_ends(say("abc", then=[end, *b"de"]))
    out, _ = serve(llm, [START], SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    assert list(out.outputs[0].token_ids) == [*b"abc", end]
    assert out.outputs[0].text == "abc"
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)
    out, _ = serve(llm, [START], greedy_params(6))
    assert list(out.outputs[0].token_ids) == [*b"abc", end, *b"de"]
    assert out.outputs[0].finish_reason == "length"


def test_ignore_eos_spares_stop_token_ids(open_ends: Callable[..., LLM]) -> None:
    """ignore_eos ignores the model's ends, not the caller's."""
    out, _ = serve(open_ends(say("abc", then=[5, 6])), [START], greedy_params(20, stop_token_ids=[6]))
    assert list(out.outputs[0].token_ids) == [*b"abc", 5, 6]
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", 6)


def test_end_as_first_token(open_ends: Callable[..., LLM]) -> None:
    """An end at once gives empty text, and the next request is served as ever."""
    llm = open_ends([START, 6], [ord("<"), *b"ok", 5])
    for _ in range(2):
        out, found = serve(llm, [START], SamplingParams(temperature=0, max_tokens=5, logprobs=0))
        assert (out.outputs[0].text, found, out.outputs[0].finish_reason) == ("", [], "stop")
        out, _ = serve(llm, [ord("<")], SamplingParams(temperature=0, max_tokens=5))
        assert out.outputs[0].text == "ok"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_min_tokens_bans_ends(tmp_path: Path, temperature: float) -> None:
    """Before min_tokens no end and no stop id is drawn, however likely and whatever the temperature; after that they end."""
    table = np.zeros((8, 8), np.float32)
    table[:, 5] = 30.0
    table[:, 7] = 29.0
    folder = models.script_model(tmp_path, table, eos_token_id=5, generation_config={"eos_token_id": [5, 6]})
    with LLM(str(folder), device="cpu", dtype="float32", block_size=4, num_blocks=64) as llm:
        params = [
            SamplingParams(temperature=temperature, seed=i, min_tokens=3, max_tokens=20, stop_token_ids=[7], logprobs=0)
            for i in range(8)
        ]
        for out in llm.generate([[1]] * 8, params, use_tqdm=False):
            token_ids = list(out.outputs[0].token_ids)
            assert not {5, 6, 7} & set(token_ids[:3])
            assert not {5, 6, 7} & set(token_ids[:-1])
            assert len(token_ids) >= 4
            if temperature < 5:
                assert token_ids[3:] in ([5], [7])
            raw = ref.log_softmax(table[1])
            assert out.outputs[0].logprobs[0][token_ids[0]].logprob == pytest.approx(raw[token_ids[0]], abs=1e-4)
        assert_idle_and_whole(llm)


@pytest.mark.parametrize(
    ("stops", "text", "spoken"), [(["ab", "bc", "ef"], "abcd", "abcdef"), (["bc", "cd"], "ab", "abcd")]
)
def test_min_tokens_and_stop_strings(open_script: OpenScript, stops: list[str], text: str, spoken: str) -> None:
    """A stop string that is complete before the fourth token is ignored for good; the next one ends the text."""
    llm = open_script(say("abcdef"))
    out, _ = serve(llm, [START], SamplingParams(temperature=0, min_tokens=4, max_tokens=20, stop=stops))
    assert out.outputs[0].text == text
    assert list(out.outputs[0].token_ids) == list(spoken.encode())
    assert out.outputs[0].stop_reason == stops[-1]


def test_min_tokens_beyond_max_tokens() -> None:
    """More tokens at least than at most is refused."""
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


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
