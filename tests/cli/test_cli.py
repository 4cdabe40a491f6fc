"""The command `minipage` as a program: its options, how it ends, and what it says of bad input."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import minipage
from minipage import LLM, SamplingParams
from minipage.cli import main
from minipage.cli.main import build_parser
from minipage.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, engine_keywords, sampling_params
from minipage.config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., tuple[int, str, str]]


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """No argument is no error: the commands are listed."""
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("generate", "chat", "inspect", "demo-model"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version tells the package's version."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"minipage {minipage.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "hi>", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["generate", "hi>", "--top-p", "2"], "top_p"),
        (["generate", "hi>", "--block-size", "0"], "block_size"),
        (["generate", "hi>", "--kv-cache-memory", "much"], "kv_cache_memory"),
        (["generate", "--file", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
        (["generate", "hi>", "--system", "be brief"], "--chat"),
        (["inspect", "--memory", "4 apples"], "4 apples"),
        (["chat", "--temperature", "nan"], "temperature"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], feed: Callable[[str], None], model: str
) -> None:
    """The line names what was wrong; there is no traceback, and nothing on standard output."""
    feed("")
    named = args if "--model" in args or args[0] == "inspect" else [*args, "--model", model]
    assert main(named) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minipage: error: ") and said in err
    assert err.count("\n") == 1


def test_a_prompt_that_cannot_fit_is_an_error(run: Run) -> None:
    """What the engine refuses is reported like any bad input."""
    code, out, err = run("generate", "0123456789" * 20, "--max-model-len", "64")
    assert (code, out) == (2, "")
    assert "max_model_len=64" in err


def test_ctrl_c_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted anywhere, a command ends quietly with the shell's code for it."""

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    code, _, err = run("generate", "hi>")
    assert code == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_it_quietly(model: str) -> None:
    """As in `minipage generate ... | head`: no traceback, and no message of the interpreter."""
    command = [sys.executable, "-m", "minipage", "generate", "~", "--max-tokens", "400", "--model", model]
    command += ["--device", "reference", "--num-blocks", "64"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(3) == b"~xy"
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_warnings_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is for people: without the source line that Python shows."""
    stream = LLM.stream

    def warn(*args: Any) -> Any:
        import warnings

        warnings.warn("something is odd", stacklevel=1)
        return stream(*args)

    monkeypatch.setattr(LLM, "stream", warn)
    code, out, err = run("generate", "hi>")
    assert (code, out, err) == (0, "hi>Paris.\n", "minipage: warning: something is odd\n")


def test_options_become_keywords() -> None:
    """What is given arrives under its keyword; what is not given is left to the defaults of LLM and SamplingParams."""
    given = "generate hi --block-size 8 --kv-cache-memory 1MiB --no-enable-prefix-caching --top-k 5 --stop a --stop b --seed 3"
    args = build_parser().parse_args(given.split())
    assert engine_keywords(args) == {"block_size": 8, "kv_cache_memory": "1MiB", "enable_prefix_caching": False}
    assert sampling_params(args) == SamplingParams(temperature=0, max_tokens=128, top_k=5, stop=["a", "b"], seed=3)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_option_is_a_keyword_that_exists(command: str) -> None:
    """LLM and SamplingParams know all that the commands offer, and the commands offer all of LLM's."""
    args = build_parser().parse_args([command])
    for option in (*ENGINE_OPTIONS, *SAMPLING_OPTIONS):
        setattr(args, option.keyword, None)
    inspect.signature(LLM.__init__).bind(None, None, **engine_keywords(args))
    assert {option.keyword for option in SAMPLING_OPTIONS} <= {field.name for field in fields(SamplingParams)}
    offered = {option.keyword for option in ENGINE_OPTIONS} | {"enable_prefix_caching"}
    assert offered == {field.name for field in fields(EngineConfig)} - {"seed"}  # --seed is each request's own
