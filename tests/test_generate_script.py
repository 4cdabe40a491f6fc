"""scripts/generate.py: runs from a clone as it is, prints results and nothing else on standard output, and tells the time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.talker import talker

from minipage import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "generate.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the talker."""
    return str(talker(tmp_path_factory.mktemp("talker")))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look up their types
    spec.loader.exec_module(module)
    return module


def engine(model: str, **changes: Any) -> list[str]:
    """The options of a small engine on the reference device."""
    options = {"model": model, "device": "reference", "num-blocks": 64, **changes}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def test_it_runs_from_any_folder(model: str, tmp_path: Path) -> None:
    """Started by its path from elsewhere it finds the clone that it is in; prompts come by a pipe, timings go beside."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), *engine(model)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, input="a>\nb*\n", capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout == "[0] a>Paris.\n[1] b*né\n"
    assert "tokens/s" in done.stderr
    assert "Traceback" not in done.stderr


def test_json_is_what_generate_returns(
    script: ModuleType, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a result, in the order of the prompts though the last one ends first, and the same as LLM.generate's."""
    prompts = ["a~", "b>", "c*"]
    options = ["--max-tokens", "9", "--n", "2", "--temperature", "0.7", "--seed", "5"]
    assert script.main([*prompts, *options, "--json", *engine(model)]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with LLM(model, device="reference", num_blocks=64) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=9, n=2, temperature=0.7, seed=5), use_tqdm=False)
    assert [result["prompt"] for result in results] == prompts
    for result, output in zip(results, expected, strict=True):
        assert [c["token_ids"] for c in result["outputs"]] == [c.token_ids for c in output.outputs]
        assert [c["text"] for c in result["outputs"]] == [c.text for c in output.outputs]


def test_chat_is_what_chat_returns(script: ModuleType, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--chat queues the rendered template, text and ids."""
    assert script.main(["a>", "--chat", "--system", "sys", "--json", *engine(model)]) == 0
    result = json.loads(capsys.readouterr().out)
    with LLM(model, device="reference", num_blocks=64) as llm:
        messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "a>"}]
        [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    assert (result["prompt"], result["prompt_token_ids"]) == (expected.prompt, expected.prompt_token_ids)
    assert result["outputs"][0]["text"] == "Paris." == expected.outputs[0].text


def test_one_bad_prompt_is_an_error_before_any_work(
    script: ModuleType, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed for the good ones; the line names what was wrong."""
    assert script.main(["a>", "x" * 100, *engine(model, **{"max-model-len": 64})]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "generate.py: error: the prompt has 100 tokens; max_model_len=64" in err


def test_timings_count_tokens_and_blocks(script: ModuleType, model: str) -> None:
    """The tokens of all completions, steps from the first to the last, and blocks in use between two steps.

    Two requests of 3 prompt tokens and 6 output tokens hold 7 slots each before their last step: 2 blocks of 4.
    """
    with LLM(model, device="reference", num_blocks=64, block_size=4) as llm:
        seen: list[int] = []
        bar = type("Bar", (), {"update": lambda self, count: seen.append(count)})()
        params = SamplingParams(temperature=0, max_tokens=6)
        measured = script.complete(llm, ["cd~", "de~"], params, bar, lambda number, output: None)
        assert sum(seen) == 12
        assert measured.num_steps == 6
        assert measured.peak_blocks == 4
        words = script.report(measured, llm, loading=0.0)
    for timing in measured.timings:
        assert (timing.num_prompt_tokens, list(timing.lengths)) == (3, [6])
        assert 0 < timing.first < timing.last <= measured.seconds
        assert timing.per_token == pytest.approx((timing.last - timing.first) / 5)
    assert "12 tokens in" in words and "4 used at the peak of 64, 4 tokens each" in words


def test_a_single_token_has_no_time_between_tokens(script: ModuleType, model: str) -> None:
    """The report of a request of one token says so instead of dividing by nothing."""
    with LLM(model, device="reference", num_blocks=64) as llm:
        bar = type("Bar", (), {"update": lambda self, count: None})()
        measured = script.complete(llm, ["a>"], SamplingParams(max_tokens=1), bar, lambda number, output: None)
        assert measured.timings[0].per_token is None
        assert "time per output token  -" in script.report(measured, llm, loading=0.0)
