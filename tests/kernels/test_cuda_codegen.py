"""The CUDA kernels as machine code: the simulator shows what they compute, this shows that a GPU can run them well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "kernel_report.py"
MISSING = 2  #: the exit status that says so


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program finds, in a process of its own: this one may have the simulator on."""
    pytest.importorskip("numba_cuda")
    file = tmp_path_factory.mktemp("codegen") / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    result = subprocess.run(
        [sys.executable, str(PROGRAM), "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if result.returncode == MISSING:
        pytest.skip(result.stderr.strip())
    assert file.exists(), result.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_kernel_compiles_for_both_architectures(report: dict[str, Any]) -> None:
    """No kernel of the package is left out, and each becomes machine code for sm_80 and sm_90."""
    for arch in ("sm_80", "sm_90"):
        assert {row["function"] for row in report["rows"] if row["capability"] == arch} == set(report["kernels"])


def test_every_kernel_keeps_to_its_budget(report: dict[str, Any]) -> None:
    """No spills, no float64, enough warps a multiprocessor; wide loads and tensor cores where they are what it is for."""
    assert [(row["name"], row["capability"], row["faults"]) for row in report["rows"] if row["faults"]] == []


def test_budgets_look_at_something(report: dict[str, Any]) -> None:
    """The disassembler's text is understood: what all kernels must have is found in it."""
    assert all(row["registers"] > 0 and row["occupancy"] > 0 for row in report["rows"])


@pytest.mark.parametrize(
    ("packages", "options", "reason"),
    [
        ("'numba_cuda'", [], "compiling CUDA kernels needs numba-cuda"),
        ("", [], "needs Numba without its simulator: unset NUMBA_ENABLE_CUDASIM"),
        ("", ["--json", "nowhere/report.json"], "--json nowhere/report.json: there is no folder nowhere"),
        ("", ["--json", "."], "--json .: no file can be written there"),
        ("", ["--bandwidth", "inf"], "--bandwidth must be above 0 and finite, got inf"),
        ("", ["--bandwidth", "nan"], "--bandwidth must be above 0 and finite, got nan"),
    ],
)
def test_what_is_missing_is_said_first(packages: str, options: list[str], reason: str, tmp_path: Path) -> None:
    """Before anything is compiled: a package, a compiler, or the folder that the report is to be written to."""
    if not packages:
        pytest.importorskip("numba_cuda")
    run = f"import runpy, sys; sys.modules |= dict.fromkeys([{packages}]); runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    # Where programs find what is beside them; and the simulator, which is none of those that are said before.
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent), "NUMBA_ENABLE_CUDASIM": "1"}
    result = subprocess.run(
        [sys.executable, "-c", run, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == MISSING and reason in result.stderr.splitlines()[-1]
    assert not result.stdout
