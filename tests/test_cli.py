"""The command ``minipage`` as people use it: what it prints where, and how it ends."""

from __future__ import annotations

import inspect
import io
import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import assert_idle_and_whole
from helpers.models import history_model, history_tensors
from helpers.talker import talker

import minipage
from minipage import LLM, SamplingParams
from minipage.cli import main
from minipage.cli.chat import Chat
from minipage.cli.console import CatchInterrupt
from minipage.cli.main import build_parser
from minipage.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, engine_keywords, sampling_params
from minipage.config import EngineConfig
from minipage.inspection import SHAREGPT_MEAN_LENGTHS, inspect_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the talker."""
    return str(talker(tmp_path_factory.mktemp("talker")))


@pytest.fixture
def run(model: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command on the talker; returns its exit code, standard output and standard error."""

    def call(command: str, *args: str) -> tuple[int, str, str]:
        named = [model] if command == "inspect" else ["--model", model, "--num-blocks", "64"]
        code = main([command, *args, *named, "--device", "reference"])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Give ``text`` on standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# ---- the program -----------------------------------------------------------------------------------------------------


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
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """The line names what was wrong; there is no traceback, and nothing on standard output."""
    feed(monkeypatch, "")
    named = args if "--model" in args or args[0] == "inspect" else [*args, "--model", model]
    assert main(named) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minipage: error: ") and said in err
    assert err.count("\n") == 1


def test_a_prompt_that_cannot_fit_is_an_error(run: Callable[..., tuple[int, str, str]]) -> None:
    """What the engine refuses is reported like any bad input."""
    code, out, err = run("generate", "0123456789" * 20, "--max-model-len", "64")
    assert (code, out) == (2, "")
    assert "max_model_len=64" in err


def test_ctrl_c_ends_with_130(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_warnings_are_one_line(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is for people: without the source line that Python shows."""
    stream = LLM.stream

    def warn(*args: Any) -> Any:
        import warnings

        warnings.warn("something is odd", stacklevel=1)
        return stream(*args)

    monkeypatch.setattr(LLM, "stream", warn)
    code, out, err = run("generate", "hi>")
    assert (code, out, err) == (0, "hi>Paris.\n", "minipage: warning: something is odd\n")


# ---- options ---------------------------------------------------------------------------------------------------------


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


# ---- generate --------------------------------------------------------------------------------------------------------


def test_one_prompt_is_continued(run: Callable[..., tuple[int, str, str]]) -> None:
    """The prompt and its completion read as one text."""
    assert run("generate", "The capital of France is>") == (0, "The capital of France is>Paris.\n", "")


def test_several_prompts_are_numbered(run: Callable[..., tuple[int, str, str]]) -> None:
    """Results come in the order of the prompts, each completion of n under its own number."""
    code, out, _ = run("generate", "a~", "b>", "--max-tokens", "4")
    assert (code, out) == (0, "[0] a~xyxy\n[1] b>Pari\n")
    code, out, _ = run("generate", "b>", "--n", "2")
    assert (code, out) == (0, "[0.0] b>Paris.\n[0.1] b>Paris.\n")


def test_chat_answers_instead_of_continuing(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_prompts_from_standard_input(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments every line that is not empty is a prompt."""
    feed(monkeypatch, "a>\n\nb*\n")
    code, out, _ = run("generate")
    assert (code, out) == (0, "[0] a>Paris.\n[1] b*né\n")


def test_prompts_from_a_file(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Lines of JSON where the first is an object, else lines of text; after the prompts of the arguments."""
    (tmp_path / "lines").write_text("b>\n")
    (tmp_path / "json").write_text('{"prompt": "two\\nlines>"}\n{"prompt_token_ids": [62]}\n')
    assert run("generate", "a>", "--file", str(tmp_path / "lines"))[1] == "[0] a>Paris.\n[1] b>Paris.\n"
    assert run("generate", "--file", str(tmp_path / "json"))[1] == "[0] two\nlines>Paris.\n[1] Paris.\n"


@pytest.mark.parametrize("line", ["[1]", "{", '{"promt": "a"}', '{"prompt": "a", "seed": 1}', "{}"])
def test_a_bad_json_line_is_named(run: Callable[..., tuple[int, str, str]], tmp_path: Path, line: str) -> None:
    """Where the first line says JSON, all must be, with keys that are known."""
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    code, out, err = run("generate", "--file", str(file))
    assert (code, out) == (2, "")
    assert f"{file}, line 2" in err


def test_json_is_all_of_standard_output(run: Callable[..., tuple[int, str, str]]) -> None:
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


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are answered until the input ends; /reset forgets, /exit ends, an unknown command is told of."""
    feed(monkeypatch, "hi>\n/reset\n/help\n/what\n\n*\n/exit\n>\n")
    code, out, err = run("chat")
    assert (code, out) == (0, "Paris.\nné\n")
    assert "a new conversation" in err and "/reset" in err and "/what" in err


@pytest.fixture
def llm(model: str) -> Iterator[LLM]:
    """The talker in this process, whole and idle at the end."""
    with LLM(model, device="reference", num_blocks=64, max_model_len=48) as llm:
        yield llm
        assert_idle_and_whole(llm)


def roles(chat: Chat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.messages]


def test_each_answer_sees_the_ones_before(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is asked with the system message and every turn so far; /reset leaves the system message."""
    asked: list[list[str]] = []
    stream_chat = llm.stream_chat

    def listen(messages: Any, params: Any) -> Any:
        asked.append([message["content"] for message in messages])
        return stream_chat(messages, params)

    monkeypatch.setattr(llm, "stream_chat", listen)
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=8), system="sys")
    for line in ("a>", "b*", "/reset", "c>"):
        chat.take(line)
    assert asked == [["sys", "a>"], ["sys", "a>", "Paris.", "b*"], ["sys", "c>"]]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request is aborted, the partial answer stays in the conversation, and the next message is answered."""
    stream_chat = llm.stream_chat

    def interrupt(messages: Any, params: Any) -> Any:
        for count, output in enumerate(stream_chat(messages, params), 1):
            if count == 4:
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(llm, "stream_chat", interrupt)
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=32), system=None)
    chat.take("~")
    assert roles(chat) == [("user", "~"), ("assistant", "xyxy")]
    assert_idle_and_whole(llm)
    monkeypatch.setattr(llm, "stream_chat", stream_chat)
    chat.take(">")
    assert roles(chat)[2:] == [("user", ">"), ("assistant", "Paris.")]
    assert capsys.readouterr().out == "xyxy\nParis.\n"


def test_ctrl_c_twice_interrupts_a_step() -> None:
    """One Ctrl-C waits for the step, a second one does not; afterwards it is as before."""
    before = signal.getsignal(signal.SIGINT)
    with CatchInterrupt() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_conversation_that_outgrows_the_model_goes_on(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """At the model's length the answer ends with a remark, the next message is refused with one, /reset makes room."""
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=None), system=None)
    chat.take("~")
    assert "has reached the model's length, 48 tokens" in capsys.readouterr().err
    kept = roles(chat)
    chat.take(">")
    assert "max_model_len=48" in capsys.readouterr().err
    assert roles(chat) == kept
    chat.take("/reset")
    chat.take(">")
    assert roles(chat) == [("user", ">"), ("assistant", "Paris.")]


def test_an_answer_cut_by_max_tokens_says_so(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of one's own is not taken for the model's."""
    Chat(llm, SamplingParams(temperature=0, max_tokens=3), system=None).take("~")
    out, err = capsys.readouterr()
    assert (out, err) == ("xyx\n", "cut off after --max-tokens 3\n")


def test_chat_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without one is refused before the first line is read."""
    path = talker(tmp_path, chat_template=None)
    assert main(["chat", "--model", str(path), "--device", "reference", "--num-blocks", "8"]) == 2
    assert "no chat template" in capsys.readouterr().err


class Terminal:
    """A command on a terminal of its own: keys go in, what the screen shows comes out."""

    def __init__(self, *command: str) -> None:
        spawn = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", spawn, *command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._shown = b""

    def press(self, keys: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(keys)

    def wait_for(self, text: bytes, keys: bytes = b"") -> None:
        """Read on until ``text`` is shown after what was waited for before; press ``keys`` each second until then."""
        assert self._process.stdout is not None
        for _ in range(60):
            self.press(keys)
            while text not in self._shown and select.select([self._process.stdout], [], [], 1)[0]:
                more = self._process.stdout.read(4096)
                assert more, f"it ended and did not show {text!r}"
                self._shown += more
            if text in self._shown:
                break
        _, found, self._shown = self._shown.partition(text)
        assert found, f"{text!r} was not shown"

    def exit_code(self) -> int:
        return self._process.wait(timeout=60)


def test_chat_on_a_terminal(model: str) -> None:
    """Ctrl-C stops an answer, at the prompt it ends nothing, and Ctrl-D ends the program."""
    command = [
        sys.executable,
        "-m",
        "minipage",
        "chat",
        "--model",
        model,
        "--device",
        "reference",
        "--num-blocks",
        "200",
    ]
    terminal = Terminal(*command, "--max-tokens", "2000")
    terminal.wait_for(b"> ")
    terminal.press(b"hi>\n")
    terminal.wait_for(b"Paris.")
    terminal.wait_for(b"> ")
    terminal.press(b"~\n")
    terminal.wait_for(b"xyxyxyxy")
    terminal.press(b"\x03")
    terminal.wait_for(b"stopped")
    terminal.wait_for(b"> ")
    # input() misses a Ctrl-C that comes between its prompt and its waiting, until the next key
    terminal.wait_for(b"Ctrl-D or /exit ends", keys=b"\x03")
    terminal.wait_for(b"> ")
    terminal.press(b"*\n")
    terminal.wait_for("né".encode())
    terminal.wait_for(b"> ")
    terminal.press(b"\x04")
    assert terminal.exit_code() == 0


# ---- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_agrees_with_what_is_allocated(tmp_path: Path) -> None:
    """Weights in every kind, bytes of a block and their number are those of an engine with the same keywords."""
    path = str(history_model(tmp_path, seed=3))
    for dtype, quantization in (
        ("float32", None),
        ("bfloat16", None),
        ("float16", None),
        ("bfloat16", "int8"),
        ("float32", "int4"),
    ):
        keywords: dict[str, Any] = {"device": "cpu", "dtype": dtype, "block_size": 8}
        report = inspect_model(path, **keywords)
        with LLM(path, quantization=quantization, kv_cache_memory="1MB", **keywords) as llm:
            assert report.weight_bytes[quantization or dtype] == llm.info.weight_bytes
            assert report.kv_shape == llm.info.kv_shape
            capacity = report.capacity(10**6, length=100)
            assert capacity.num_blocks == llm.stats().num_blocks
            assert capacity.num_tokens * report.kv_shape.bytes_per_token == llm.info.kv_cache_bytes


def test_inspect_counts_parameters_and_dtypes(tmp_path: Path) -> None:
    """The count is that of the tensors in the file, by the file's own dtypes; nothing is loaded to tell it."""
    path = history_model(tmp_path, seed=3, dtype="bfloat16")
    report = inspect_model(str(path), device="reference")
    assert report.num_parameters == sum(tensor.size for tensor in history_tensors(3).values())
    assert report.file_dtypes == {"BF16": report.num_parameters}
    assert report.file_bytes == (path / "model.safetensors").stat().st_size


def test_capacity_beside_a_static_cache(tmp_path: Path) -> None:
    """By hand: 4 MiB in blocks of 16 tokens of 256 bytes are 1024 blocks; a request of 499 tokens takes 32 of them, or one of
    16 rows of 1024 tokens. 13 of 512 slots are empty in pages, 525 of 1024 in a row: less than 4% is the paper's claim."""
    report = inspect_model(str(history_model(tmp_path, seed=3)), device="reference")
    assert report.kv_shape.bytes_per_token == 2 * 2 * 2 * 8 * 4
    capacity = report.capacity(4 << 20, sum(SHAREGPT_MEAN_LENGTHS), max_model_len=1024)
    assert (capacity.num_blocks, capacity.num_tokens) == (1024, 16384)
    assert (capacity.paged_requests, capacity.static_requests) == (32, 16)
    assert capacity.paged_waste == pytest.approx(13 / 512)
    assert capacity.static_waste == pytest.approx(525 / 1024)
    assert capacity.paged_waste < 0.04


def test_capacity_of_layers_with_a_window(tmp_path: Path) -> None:
    """A layer of each kind, as the engine groups them. By hand: a request of 100 tokens takes 25 blocks of 4 in the layer
    that sees all, and 11/4 rounded up, and one, in the one that sees 11; in all 4 * 29 slots for 111 tokens that are seen."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
    path = str(history_model(tmp_path, seed=3, **layers))
    report = inspect_model(path, device="reference", block_size=4)
    with LLM(path, device="reference", block_size=4, kv_cache_memory="64KiB") as llm:
        assert report.kv_shape == llm.info.kv_shape
        capacity = report.capacity(64 << 10, 100, max_model_len=200)
        assert capacity.num_blocks == llm.stats().num_blocks == 128
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert capacity.num_tokens == 256
    assert (capacity.paged_requests, capacity.static_requests) == (128 // 29, 65536 // (200 * 256))
    assert capacity.paged_waste == pytest.approx(1 - 111 / (4 * 29))
    assert capacity.static_waste == pytest.approx(1 - 111 / 400)


def test_inspect_prints_for_people_and_programs(run: Callable[..., tuple[int, str, str]]) -> None:
    """The same numbers in words and as one JSON object."""
    code, out, _ = run("inspect", "--memory", "8MiB", "--length", "100", "--length", "200")
    assert code == 0
    code, text, _ = run("inspect", "--memory", "8MiB", "--length", "100", "--length", "200", "--json")
    report = json.loads(text)
    assert [capacity["length"] for capacity in report["capacity"]] == [100, 200]
    assert f"{report['num_parameters']:,}" in out
    assert f"{report['capacity'][0]['num_tokens']:,} tokens" in out
    assert f"paged {report['capacity'][1]['paged_requests']} at once" in out


def test_inspect_refuses_lengths_that_the_model_does_not_take(run: Callable[..., tuple[int, str, str]]) -> None:
    """A request longer than the longest sequence has no place anywhere."""
    code, _, err = run("inspect", "--length", "5000")
    assert code == 2
    assert "length=5000" in err and "4096" in err
