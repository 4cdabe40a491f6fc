"""What the scripts that measure have in common: their help, and the folders that they run from."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))


@pytest.mark.parametrize("name", ["decode", "kernels", "memory", "scheduler", "streaming"])
def test_help_tells_the_defaults_that_say_something(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A default is told once, and not where it is None, "off" or no entries."""
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench_{name}").main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: " in text
    assert not re.search(r"\(default: (None|False|\[\])\)|\) \(default: ", text)


@pytest.mark.parametrize("script", ["bench_memory.py", "bench_kernels.py", "bench_scheduler.py"])
def test_scripts_run_from_any_folder(script: str, tmp_path: Path) -> None:
    """They find the clone that they are in."""
    command = [sys.executable, str(SCRIPTS / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--json" in done.stdout
