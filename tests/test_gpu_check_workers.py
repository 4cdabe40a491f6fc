"""The processes of scripts/gpu_check.py: whatever ends one of them, each step has its row."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What starts them, as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_check_workers")


#: A worker whose steps go wrong in all ways, each as its name says.
WORKER = """
import json, os, sys, time
names = ["good", "crash", "wrong", "unsound", "hang", "good again", "crash again"]
first = int(sys.argv[sys.argv.index("--share") + 3])
print(json.dumps({"names": names[first:]}), flush=True)
for name in names[first:]:
    if name.startswith("crash"):
        os._exit(3)
    if name == "hang":
        time.sleep(1000)
    ok = name.startswith("good")
    print(json.dumps({"row": {"name": name, "ok": ok, "result": "a row"}}), flush=True)
    if name == "unsound":
        sys.exit(9)
"""


def rows_of(workers: Any, script: Path, program: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The rows of a worker that runs a program."""
    script.write_text(program)
    monkeypatch.setattr(workers, "SCRIPT", script)
    monkeypatch.setattr(workers, "PATIENCE", 5.0)
    rows: list[Any] = []
    workers.take("cuda", [workers.Share("ops")], seconds, rows.append)
    return [(row.name, row.ok, row.result) for row in rows]


def test_a_step_that_ends_or_hangs_its_process_ends_no_other(
    workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has one row, in order: what a GPU does to the process of one of them is that one's."""
    assert rows_of(workers, tmp_path / "worker.py", WORKER, 1000.0, monkeypatch) == [
        ("good", True, "a row"),
        ("crash", False, "its process ended with status 3"),
        ("wrong", False, "a row"),
        ("unsound", False, "a row"),
        ("hang", False, "killed after 5 s"),
        ("good again", True, "a row"),
        ("crash again", False, "its process ended with status 3"),
    ]


def test_a_process_that_cannot_start_is_wrong(workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the names of steps are told, the part is wrong."""
    rows = rows_of(workers, tmp_path / "worker.py", "raise SystemExit(7)", 1000.0, monkeypatch)
    assert rows == [("ops", False, "its process ended with status 7")]


def test_what_there_is_no_time_for_is_left_out(workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes longer than there is time is ended, and it and those behind it are left out by name."""
    monkeypatch.setattr(workers, "GRACE", 0.0)
    program = WORKER.replace('["good", "crash", "wrong", "unsound", ', '["good", ')
    rows = rows_of(workers, tmp_path / "worker.py", program, 3.0, monkeypatch)
    assert rows[0] == ("good", True, "a row")
    assert rows[1:] == [(name, True, "left out: no time") for name in ("hang", "good again", "crash again")]


def test_workers_find_the_toolkit_of_nvcc(workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks for its compiler where CUDA_HOME says, which nobody need have set; but what is set stays."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "CUDA_HOME" not in workers.environment()  # a toolkit without the compiler is of no use
    (tmp_path / "cuda" / "nvvm").mkdir()
    assert workers.environment()["CUDA_HOME"] == str(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_PATH", "elsewhere")
    assert "CUDA_HOME" not in workers.environment()


def test_shares_have_every_step_once(workers: Any) -> None:
    """What several processes do together is what one would do."""
    names = [step.name for step in workers.Share("ops").steps(True)]
    parts = [[step.name for step in workers.Share("ops", i, 7).steps(True)] for i in range(7)]
    assert sorted(name for part in parts for name in part) == sorted(names) and len(set(names)) == len(names)
    assert max(sum("long" in name for name in part) for part in parts) <= 2  # those that take longest are spread


def test_a_worker_begins_nothing_late(workers: Any) -> None:
    """A real worker without time says so of each of its steps."""
    pytest.importorskip("numba_cuda")
    pytest.importorskip("greenlet")
    command = [sys.executable, str(workers.SCRIPT), "--device", "cuda-sim", "--part", "models", "--seconds", "-1"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    names, *rows = map(json.loads, result.stdout.splitlines())
    assert [row["row"]["name"] for row in rows] == names["names"]
    assert all(row["row"]["is_left_out"] and row["row"]["result"] == "left out: no time" for row in rows)


#: A worker whose first step is wrong; with an argument, its device cannot be used afterwards.
UNSOUND_WORKER = """
import sys
import gpu_check_workers as workers
from gpu_check_steps import Row, Step
from minipage.device import open_device

def broken():
    raise RuntimeError("an illegal memory access was encountered")

device = open_device("reference")
if sys.argv[1:]:
    device.synchronize = broken
workers.open_device = lambda name: device
workers.PARTS["ops"] = lambda large: [Step(name, lambda name, device: Row(name, False, "")) for name in ("first", "next")]
sys.exit(workers.work("reference", workers.Share("ops"), 0, 1000.0))
"""


@pytest.mark.parametrize(("trouble", "status", "names"), [([], 0, ["first", "next"]), (["broken"], 9, ["first"])])
def test_a_worker_ends_where_its_device_is_unusable(
    workers: Any, trouble: list[str], status: int, names: list[str]
) -> None:
    """The steps that follow would be called wrong for nothing: another process takes them."""
    path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
    command = [sys.executable, "-c", UNSOUND_WORKER, *trouble]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == status == (workers.UNSOUND if trouble else 0)
    assert [json.loads(line)["row"]["name"] for line in done.stdout.splitlines()[1:]] == names
