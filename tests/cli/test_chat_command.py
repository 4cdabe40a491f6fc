"""`minipage chat`: conversations, interruptions, and a terminal."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.checks import assert_idle_and_whole
from helpers.talker import talker

from minipage import LLM, SamplingParams
from minipage.cli import main
from minipage.cli.chat import Chat
from minipage.interrupts import CatchInterrupt

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., tuple[int, str, str]]


def test_chat_keeps_the_conversation(run: Run, feed: Callable[[str], None]) -> None:
    """Lines are answered until the input ends; /reset forgets, /exit ends, an unknown command is told of."""
    feed("hi>\n/reset\n/help\n/what\n\n*\n/exit\n>\n")
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
        # A shell that runs tests in the background may let them ignore Ctrl-C.
        spawn = "import pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        spawn += "sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
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
