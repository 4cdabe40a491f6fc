"""The talker's folder, and a way to run commands on it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from helpers.talker import talker

from minipage.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the talker."""
    return str(talker(tmp_path_factory.mktemp("talker")))


@pytest.fixture
def run(model: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on the talker; returns its exit code, standard output and standard error."""

    def call(command: str, *args: str) -> tuple[int, str, str]:
        named = [model] if command == "inspect" else ["--model", model, "--num-blocks", "64"]
        code = main([command, *args, *named, "--device", "reference"])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives a text on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))
