"""`minipage generate`: where prompts come from and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.models import history_tensors, write_safetensors
from helpers.talker import talker

from minipage import LLM
from minipage.cli import main

Run = Callable[..., tuple[int, str, str]]


def test_one_prompt_is_continued(run: Run) -> None:
    """The prompt and its completion read as one text."""
    assert run("generate", "The capital of France is>") == (0, "The capital of France is>Paris.\n", "")


def test_several_prompts_are_numbered(run: Run) -> None:
    """Results come in the order of the prompts, each completion of n under its own number."""
    code, out, _ = run("generate", "a~", "b>", "--max-tokens", "4")
    assert (code, out) == (0, "[0] a~xyxy\n[1] b>Pari\n")
    code, out, _ = run("generate", "b>", "--n", "2")
    assert (code, out) == (0, "[0.0] b>Paris.\n[0.1] b>Paris.\n")


def test_chat_answers_instead_of_continuing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """--chat puts a prompt through the template and shows the answer alone; --json shows what the template made of it."""
    asked: list[Any] = []
    stream_chat = LLM.stream_chat

    def listen(llm: LLM, messages: Any, params: Any) -> Any:
        asked.extend(messages)
        return stream_chat(llm, messages, params)

    monkeypatch.setattr(LLM, "stream_chat", listen)
    assert run("generate", "--chat", "--system", "be brief", "capital>") == (0, "Paris.\n", "")
    assert asked == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "capital>"}]
    code, out, _ = run("generate", "--chat", "--system", "be brief", "--json", "capital>")
    assert (code, json.loads(out)["prompt"]) == (0, "be brief|capital>")


def test_prompts_from_standard_input(run: Run, feed: Callable[[str], None]) -> None:
    """Without arguments every line that is not empty is a prompt."""
    feed("a>\n\nb*\n")
    code, out, _ = run("generate")
    assert (code, out) == (0, "[0] a>Paris.\n[1] b*né\n")


def test_prompts_from_a_file(run: Run, tmp_path: Path) -> None:
    """Lines of JSON where the first is an object, else lines of text; after the prompts of the arguments."""
    (tmp_path / "lines").write_text("b>\n")
    (tmp_path / "json").write_text('{"prompt": "two\\nlines>"}\n{"prompt_token_ids": [62]}\n')
    assert run("generate", "a>", "--file", str(tmp_path / "lines"))[1] == "[0] a>Paris.\n[1] b>Paris.\n"
    assert run("generate", "--file", str(tmp_path / "json"))[1] == "[0] two\nlines>Paris.\n[1] Paris.\n"


@pytest.mark.parametrize("line", ["[1]", "{", '{"promt": "a"}', '{"prompt": "a", "seed": 1}', "{}"])
def test_a_bad_json_line_is_named(run: Run, tmp_path: Path, line: str) -> None:
    """Where the first line says JSON, all must be, with keys that are known."""
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    code, out, err = run("generate", "--file", str(file))
    assert (code, out) == (2, "")
    assert f"{file}, line 2" in err


def test_json_is_all_of_standard_output(run: Run) -> None:
    """One object a line with the names of RequestOutput and CompletionOutput."""
    code, out, _ = run("generate", "--json", "a*", "b>", "--n", "2", "--logprobs", "2")
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [result["prompt"] for result in results] == ["a*", "b>"]
    assert [completion["index"] for completion in results[0]["outputs"]] == [0, 1]
    first = results[0]["outputs"][0]
    assert (first["text"], first["finish_reason"], len(first["token_ids"])) == ("né", "stop", 4)
    assert first["logprobs"][0][str(ord("n"))] == {
        "logprob": pytest.approx(0, abs=1e-4),
        "rank": 1,
        "decoded_token": "n",
    }


def test_speculation_shows_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """--speculative ngram and how many tokens it guesses get to the engine, and change nothing of what is printed."""
    plain = run("generate", "xyxyxy~", "--max-tokens", "30")
    options: list[tuple[Any, Any]] = []
    init = LLM.__init__

    def listen(llm: LLM, model: Any, **keywords: Any) -> None:
        options.append((keywords["speculative"], keywords["num_speculative_tokens"]))
        init(llm, model, **keywords)

    monkeypatch.setattr(LLM, "__init__", listen)
    speculative = ("--speculative", "ngram", "--num-speculative-tokens", "3")
    assert run("generate", "xyxyxy~", "--max-tokens", "30", *speculative) == plain
    assert options == [("ngram", 3)]


def test_prompts_nested_deeper_than_json_goes(run: Run, feed: Callable[[str], None]) -> None:
    """A first line that only begins as JSON is text, however deep; among lines of JSON it is an error that names the line."""
    deep = "[" * 1000 + ">"
    feed(deep + "\n")
    assert run("generate") == (0, deep + "Paris.\n", "")
    feed('{"prompt": ">"}\n' + '{"prompt":' * 100_000)
    code, out, err = run("generate")
    assert (code, out) == (2, "") and "standard input, line 2 is not JSON" in err


def test_a_prompt_of_null_and_token_ids(run: Run, feed: Callable[[str], None]) -> None:
    """A key that is null is as one that is left out."""
    feed('{"prompt": null, "prompt_token_ids": [62]}')
    assert run("generate") == (0, "Paris.\n", "")
    feed('{"prompt": ">", "prompt_token_ids": null}')
    assert run("generate") == (0, ">Paris.\n", "")


def test_a_byte_order_mark_is_not_text(run: Run, feed: Callable[[str], None], tmp_path: Path) -> None:
    """Files may begin with one, which some editors write."""
    (tmp_path / "json").write_text('\ufeff{"prompt": "a>"}\n')
    assert run("generate", "--file", str(tmp_path / "json"))[1] == "a>Paris.\n"
    feed("\ufeffa>\n")
    assert run("generate")[1] == "a>Paris.\n"


def test_logits_that_are_none_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], feed: Callable[[str], None]
) -> None:
    """Where no token can be drawn, what there is is shown and the command fails with the reason; a chat says it and goes on."""
    folder = Path(talker(tmp_path))
    tensors = history_tensors(0, json.loads((folder / "config.json").read_text()))
    tensors["model.embed_tokens.weight"][ord("!")] = np.inf
    write_safetensors(folder / "model.safetensors", tensors)
    options = ["--model", str(folder), "--num-blocks", "64", "--device", "reference", "--max-tokens", "1"]
    for prompts in (["a!"], ["b", "a!"], ["a!", "--json"], ["a!", "--n", "2"]):
        assert main(["generate", *prompts, *options]) == 2
        out, err = capsys.readouterr()
        number = prompts.index("a!")
        assert "a!" in out
        assert f"completion 0 of prompt {number} was cut off: no token can be drawn" in err
    feed("a!\nb\n")
    assert main(["chat", *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("(nothing)\n") and len(out) > len("(nothing)\n")
    assert "cut off: no token can be drawn" in err
