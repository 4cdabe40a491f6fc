"""The processes of a comparison: which interpreter has which peer, warm workers, and command lines timed from their start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from .tasks import Settings, Task

SCRIPTS = Path(__file__).resolve().parent.parent
OURS = "minipage"
#: Peer -> what has to be importable for it.
PEER_MODULES = {
    "llama.cpp": ("llama_cpp",),
    "transformers": ("transformers", "torch"),
    "ctranslate2": ("ctranslate2", "transformers", "torch"),  # the last two to convert the checkpoint
}
LLAMA_CLIS = ("llama-completion", "llama-cli")  #: the older llama-cli is what llama-completion is now
CLI_CONTEXT = 256  #: tokens that command lines make room for
TIMEOUT_S = 30.0  #: for a process to end that has been told to

IMPORTABLE = "import sys, importlib.util as u; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))"


class EngineFailed(Exception):
    """An engine's process ended or said something else than an answer; the message has its last words."""


class Side(NamedTuple):
    """An engine and the interpreter that it runs in."""

    name: str
    python: str


def find_peer(name: str, pythons: Sequence[str]) -> Side | None:
    """The first interpreter that has a peer's packages."""
    for python in pythons:
        try:
            done = subprocess.run([python, "-c", IMPORTABLE, *PEER_MODULES[name]], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return Side(name, python)
    return None


def environment(side: Side, passive_peers: bool) -> dict[str, str]:
    """Lets a worker import this package, and minipage's of the clone that it is in.

    OpenMP's threads wait for each other busily. On a machine that does other things as well they wait for one that cannot
    run until their time slices end, hundreds of times a token; with ``passive_peers`` they sleep.

    Python may keep what it compiles, whatever the caller's environment says: else each start would compile all of a clone.
    """
    path = [str(SCRIPTS), *([str(SCRIPTS.parent)] if side.name == OURS else [])]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    policy = {"OMP_WAIT_POLICY": "passive"} if passive_peers and side.name != OURS else {}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**variables, **policy, "PYTHONPATH": os.pathsep.join(path)}


def worker_command(side: Side, settings: Settings) -> list[str]:
    """The command of a worker."""
    fields = {**settings._asdict(), "tasks": [task.to_json() for task in settings.tasks]}
    return [side.python, "-m", "decode_bench.worker", side.name, json.dumps(fields)]


class Worker:
    """A warm process with an engine in it. It computes while it is asked, and at no other time."""

    def __init__(self, side: Side, settings: Settings, env: dict[str, str]) -> None:
        self.side = side
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            worker_command(side, settings),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.about: str = self._answer()["about"]
        except BaseException:
            self.close()
            raise

    def run(self, task: Task) -> dict[str, Any]:
        """Have it do a task; returns ``tokens``, ``seconds`` and ``peak_bytes``. Raises EngineFailed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its last words are more telling
            self._process.stdin.write(json.dumps(task.to_json()) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip().splitlines() or [line.strip() or "nothing"]
            raise EngineFailed(f"{self.side.name} failed: {words[-1]}") from None
        return answer

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def first_token_command(side: Side, settings: Settings, prompt: str, llama_cli: str | None) -> list[str]:
    """A command line that continues a prompt by one token: minipage's own, llama.cpp's own where there is one, or a worker's."""
    if side.name == OURS:
        options = ["--device", settings.device, "--num-threads", str(settings.threads)]
        options += ["--max-tokens", "1", "--max-model-len", str(CLI_CONTEXT)]
        return [side.python, "-m", "minipage", "generate", "-m", settings.model, *options, prompt]
    if side.name == "llama.cpp" and llama_cli is not None:
        options = ["-n", "1", "-t", str(settings.threads), "-c", str(CLI_CONTEXT), "--temp", "0"]
        return [llama_cli, "-m", settings.model, "-p", prompt, *options, "--no-warmup", "-no-cnv"]
    return [*worker_command(side, settings), "--first-token", prompt]


def find_llama_cli(given: str | None) -> str | None:
    """llama.cpp's program for completions: the one that is named, or one in PATH."""
    return given or next(filter(None, map(shutil.which, LLAMA_CLIS)), None)


def seconds_to_first_token(command: Sequence[str], env: dict[str, str], prompt: str) -> float:
    """From the start of a process until its output goes beyond the prompt, which it may repeat. Raises EngineFailed."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        with subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            assert process.stdout is not None
            shown = b""
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                shown += chunk
                if beyond(shown.decode(errors="ignore"), prompt):
                    seconds = time.perf_counter() - start
                    process.stdout.read()  # lets it end by itself
                    return seconds
        errors.seek(0)
        words = errors.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        raise EngineFailed(f"{Path(command[0]).name} showed no token: {words[-1]}")


def beyond(shown: str, prompt: str) -> bool:
    """Whether a program's output is more than the prompt, or something else."""
    text = shown.strip()
    return bool(text) and not prompt.startswith(text)
