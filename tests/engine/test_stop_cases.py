"""Ways in which the end of a text has been wrong elsewhere: stops, and ends of the model's own, streamed and in one go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.checks import assert_idle_and_whole, greedy_params
from helpers.scripted import END, START, STOP, OpenScript, say, serve

from minipage import LLM, SamplingParams
from minipage.text.stop import StopFilter


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
