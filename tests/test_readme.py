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
    named = paths_in(README) | set(re.findall(r"python (scripts/\w+\.py)", README))
    tree = next(block for block in blocks(README, "text") if block.startswith("minipage/"))
    folder = place = ""
    for line in tree.splitlines():
        entry, indent = line.split()[0], len(line) - len(line.lstrip())
        if indent == 0:
            folder = place = entry
        elif indent == 2:  # deeper lines say more of the same place
            place = folder + entry
        named.add(place)
        inside = place if place.endswith("/") else folder
        named |= {inside + name for name in re.findall(r"\w+\.py\b", line)}
    assert len(named) > 90
    assert missing(named) == []


def test_paths_of_the_guide_exist() -> None:
    """Files that CONTRIBUTING names are there, but for those to be made."""
    named = {path for path in paths_in((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) if "NAME" not in path}
    assert len(named) > 20
    assert missing(named) == []


def paths_in(text: str) -> set[str]:
    """Paths in the text between backticks."""
    return set(re.findall(r"`((?:minipage|kernels|models|tests|scripts)/[\w./]+)`", text))


def missing(named: set[str]) -> list[str]:
    """Those that are not in the clone."""
    return [path for path in sorted(named) if not (ROOT / path).exists()]
