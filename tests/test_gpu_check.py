"""scripts/gpu_check.py, as far as it goes without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minipage.device import Device, open_device
from minipage.kernels import reference
from minipage.kernels.ops import WEIGHT_KINDS

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_everything_is_right_in_the_simulator(tmp_path: Path) -> None:
    """With device cuda-sim, and threads in shuffled order, all is well: exit status 0, a table, a report with all ops."""
    pytest.importorskip("numba_cuda")
    pytest.importorskip("greenlet")
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--device", "cuda-sim"]
    environment = os.environ | {"OUT": str(tmp_path), "MINIPAGE_SIMULATOR_SEED": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    names = " ".join(row["name"] for row in report["rows"])
    for op in (
        "linear",
        "embed",
        "norms",
        "elementwise",
        "rope_and_cache",
        "copy_blocks",
        "sample",
        "attention",
        "tokens",
    ):
        assert op in names
    assert f"{len(report['rows'])} passed, 0 failed" in result.stdout
    assert "left out" not in result.stdout


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_check")


def broken_device(**ops: Any) -> Device:
    """The reference device with some ops replaced."""
    device = open_device("reference")
    device.ops = SimpleNamespace(**{**vars(reference), **ops})  # type: ignore[assignment]
    return device


def nearly_add(out: Any, x: Any, y: Any) -> None:
    out[:] = x + y + np.float32(1e-3)


def add_nothing(out: Any, x: Any, y: Any) -> None:
    out[:] = np.nan


def raise_instead(out: Any, x: Any, y: Any) -> None:
    raise RuntimeError("launch failed")


@pytest.mark.parametrize("add", [nearly_add, add_nothing, raise_instead])
def test_an_op_that_is_wrong_is_reported(gpu_check: Any, add: Any) -> None:
    """A result a little off, NaN, or an exception makes the op's row wrong, and no other."""
    wrong = [row.name for row in gpu_check.check_ops(broken_device(add=add), large=False) if not row.ok]
    assert wrong == ["elementwise T3 I40"]


def test_bits_that_depend_on_company_are_reported(gpu_check: Any) -> None:
    """A linear layer whose rounding depends on the number of tokens is found, although it is exact enough."""

    def linear(out: Any, x: Any, weight: Any, bias: Any) -> None:
        reference.linear(out, x, weight, bias)
        out *= np.float32(1 + 1e-6 * (len(x) > 1))

    wrong = [row.name for row in gpu_check.check_ops(broken_device(linear=linear), large=False) if not row.ok]
    assert wrong == [f"linear {kind} alone and in a batch" for kind in WEIGHT_KINDS]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_decode_steps_are_whole_and_counted(gpu_check: Any, kind: str) -> None:
    """The step that is timed computes finite logits for all sequences, and its bytes are those of weights, K and V."""
    device = open_device("reference")
    decode = importlib.import_module("gpu_check_decode")
    step, num_bytes = decode.decode_step(device, "tiny", kind, batch=3, context=20)
    step()
    logits = next(cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "logits")).logits
    assert np.isfinite(logits).all() and np.ptp(logits, axis=1).min() > 0
    _, params = decode.loaded(device, "tiny", kind)
    weights = sum(weight.nbytes for name, weight in params.items() if name != "embed" and hasattr(weight, "kind"))
    kv_bytes = 3 * 20 * 2 * 2 * 2 * 8 * (4 if kind == "float32" else 2)
    assert num_bytes == weights + kv_bytes


def test_only_ties_may_give_another_token(gpu_check: Any) -> None:
    """From the first token on that may be another nothing is known; before it all must be equal."""
    same = gpu_check.same_up_to_ties
    assert same([1, 2, 3], [1, 2, 3], [0.5, 0.0, 0.5])
    assert same([1, 9, 8], [1, 2, 3], [0.5, 0.01, 0.5])
    assert not same([1, 9, 3], [1, 2, 3], [0.01, 0.5, 0.01])


def test_random_folders_are_models(gpu_check: Any, tmp_path: Path) -> None:
    """They load in the dtype that they are written in, and the devices agree on them."""
    from minipage import LLM

    for dtype in ("float32", "bfloat16"):
        shape = gpu_check.SHAPES["tiny"] | {"torch_dtype": dtype}
        gpu_check.write_model(tmp_path, shape)
        with LLM(str(tmp_path), device="reference", num_blocks=8, max_model_len=32) as llm:
            assert dtype in llm.info.weight_kinds
    row = gpu_check.check_tokens("tokens", "reference", "tiny", "cpu")
    assert row.ok, row


def test_peers_that_are_not_there_are_left_out(gpu_check: Any) -> None:
    """Nothing of theirs is needed, and nothing of theirs can fail the check."""

    def broken(name: str) -> Any:
        raise RuntimeError("no kernel image")

    row = gpu_check.optional("peer", broken)
    assert row.ok and row.result == "left out: RuntimeError: no kernel image"
