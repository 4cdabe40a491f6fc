"""The CUDA kernels as machine code: the simulator shows what they compute, this shows that a GPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "cuda_codegen.py"


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """What the program prints, in a process of its own: this one may have the simulator on."""
    pytest.importorskip("numba_cuda")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    if "missing" in lines[0]:
        pytest.skip(f"compiling CUDA kernels needs {lines[0]['missing']}")
    return lines


def test_every_kernel_compiles_for_both_architectures(compiled: list[dict[str, Any]]) -> None:
    """No kernel of the package is left out, and each becomes machine code for sm_80 and sm_90."""
    for arch in ("sm_80", "sm_90"):
        assert {code["function"] for code in compiled[1:] if code["capability"] == arch} == set(compiled[0]["kernels"])


def test_no_kernel_spills(compiled: list[dict[str, Any]]) -> None:
    """All variables of all kernels live in registers: nothing spilled, no stack."""
    assert [c for c in compiled[1:] if c["spill_bytes"] or c["stack_bytes"]] == []


def test_no_kernel_computes_in_float64(compiled: list[dict[str, Any]]) -> None:
    """No Python float has slipped into a kernel: float64 is up to 64 times slower on most GPUs."""
    assert [c["name"] for c in compiled[1:] if c["float64_instructions"]] == []


def test_blocks_fit_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    """Registers times the most threads of a block, and static shared memory, stay within what any GPU gives a block."""
    assert [c["name"] for c in compiled[1:] if c["registers"] * 256 > 65536 or c["shared_bytes"] > 48 * 1024] == []
