"""What the README shows works: its commands are understood, its program runs, its paths exist, and both languages agree."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from helpers.talker import talker

import minipage
from minipage.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str = "") -> list[str]:
    """The contents of the fenced code blocks, of one language or all."""
    return re.findall(rf"^```{language}.*?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[list[str]]:
    """The arguments of every line that runs ``program``, alone or after others on the line."""
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|", line)]
    return [shlex.split(part.removeprefix(program)) for part in parts if part.startswith(program + " ")]


def test_both_languages_show_the_same() -> None:
    """Commands, programs and outputs are equal, and so are the numbers of sections, table rows and rules."""
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert blocks(chinese) == blocks(README)
    for mark in ("# ", "## ", "- ", "| "):
        in_english, in_chinese = (
            len(re.findall(f"^{re.escape(mark)}", text, re.MULTILINE)) for text in (README, chinese)
        )
        assert in_english == in_chinese, mark


def test_commands_are_understood() -> None:
    """Every option of the README's commands exists."""
    shown = commands("minipage") + commands(".venv/bin/minipage")
    assert {args[0] for args in shown} == {"generate", "chat", "inspect", "demo-model"}
    for args in shown:
        build_parser().parse_args(args)


def test_the_two_commands_are_single_lines() -> None:
    """One installs and runs the main job, one installs and runs the tests; each makes its own environment."""
    main_job, tests = blocks(README, "sh")[:2]
    for block in (main_job, tests):
        assert block.count("\n") == 1
        assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert ".venv/bin/minipage generate" in main_job
    assert tests.rstrip().endswith(".venv/bin/pytest")


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python example, with a tiny model in place of the demo model."""
    model = str(talker(tmp_path))
    monkeypatch.setattr(minipage, "LLM", partial(minipage.LLM, model, device="reference", num_blocks=64))
    [program] = blocks(README, "python")
    exec(compile(program, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "Once upon a time" in out and "Stats(" in out


def test_paths_exist() -> None:
    """Files that the map and the text name are where they say."""
    named = set(re.findall(r"`((?:minipage|kernels|models|tests|scripts)/[\w./]+)`", README))
    named |= set(re.findall(r"python (scripts/\w+\.py)", README))
    tree = next(block for block in blocks(README, "text") if block.startswith("minipage/"))
    folder = ""
    for line in tree.splitlines():
        entry, *rest = line.split()
        folder = entry if not line.startswith(" ") else folder
        place = f"{folder}{entry}" if line.startswith(" ") else entry
        named.add(place)
        if place.endswith("/") and line.startswith(" "):
            named |= {place + name for name in rest if re.fullmatch(r"\w+\.py", name)}
    assert len(named) > 25
    assert [path for path in named if not (ROOT / path).exists()] == []
