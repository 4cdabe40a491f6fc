"""scripts/gpu_check.py, as far as it goes without a GPU: what its steps find, and what it says of that."""

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
    assert f"{len(report['rows'])} passed, 0 failed, 0 left out" in result.stdout


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    """Is known before anything is checked."""
    environment = os.environ | {"OUT": str(tmp_path / "nowhere")}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--device", "cuda-sim"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2 and "nowhere: there is no such folder" in result.stderr.splitlines()[-1]
    (tmp_path / "nowhere" / "gpu_check.json").mkdir(parents=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2 and "gpu_check.json cannot be written there" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_time_that_is_none(minutes: str) -> None:
    """Is refused: all would be left out, and nothing be wrong."""
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--device", "cuda-sim", f"--minutes={minutes}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "--minutes must be above 0" in result.stderr.splitlines()[-1]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the script does, as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_check_steps")


def wrong_ops(steps: Any, device: Device) -> list[str]:
    """The names of the checks of ops that find something wrong."""
    return [step.name for step in steps.op_steps(large=False) if not steps.guarded(step, device).ok]


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
def test_an_op_that_is_wrong_is_reported(steps: Any, add: Any) -> None:
    """A result a little off, NaN, or an exception makes the op's row wrong, and no other."""
    assert wrong_ops(steps, broken_device(add=add)) == ["elementwise T3 I40"]


def test_bits_that_depend_on_company_are_reported(steps: Any) -> None:
    """A linear layer whose rounding depends on the number of tokens is found, although it is exact enough."""

    def linear(out: Any, x: Any, weight: Any, bias: Any) -> None:
        reference.linear(out, x, weight, bias)
        out *= np.float32(1 + 1e-6 * (len(x) > 1))

    assert wrong_ops(steps, broken_device(linear=linear)) == [
        f"linear {kind} alone and in a batch" for kind in WEIGHT_KINDS
    ]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_decode_steps_are_whole_and_counted(steps: Any, kind: str) -> None:
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


def test_only_ties_may_give_another_token(steps: Any) -> None:
    """From the first token on that may be another nothing is known; before it all must be equal."""
    same = steps.same_up_to_ties
    assert same([1, 2, 3], [1, 2, 3], [0.5, 0.0, 0.5])
    assert same([1, 9, 8], [1, 2, 3], [0.5, 0.01, 0.5])
    assert not same([1, 9, 3], [1, 2, 3], [0.01, 0.5, 0.01])


GAPS = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("check", ["check_tokens", "check_drawn"])
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_other_tokens_are_reported(steps: Any, check: str, wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any prompt: those of the device, and those that it draws itself."""

    def tokens(folder: str, device: str, prompts: Any, logprobs: int | None = 2, **limits: Any) -> Any:
        found = [[1, 2], [3, 4]]
        if device == "checked" and (logprobs is None) == (check == "check_drawn") and wrong is not None:
            found[wrong] = [9, 9]
        return found, GAPS

    monkeypatch.setattr(steps, "greedy_tokens", tokens)
    more = {"shape": "tiny", "expected_from": "another"} if check == "check_tokens" else {}
    row = getattr(steps, check)("tokens", SimpleNamespace(name="checked"), **more)
    assert row.ok == (wrong is None) and ("9, 9" in row.result) == (wrong is not None)


@pytest.mark.parametrize("where", [None, "recorded", "launched one by one"])
@pytest.mark.parametrize("drawn_by", ["host", "device"])
def test_recordings_that_give_other_tokens_are_reported(
    steps: Any, where: str | None, drawn_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever draws."""
    device = open_device("reference")
    record = type(device).record

    def tokens(folder: str, name: str, prompts: Any, logprobs: int | None = 2, **limits: Any) -> Any:
        how = "recorded" if type(device).record is record else "launched one by one"
        is_wrong = how == where and (logprobs is None) == (drawn_by == "device")
        return [[9 if is_wrong else 1]], GAPS

    monkeypatch.setattr(steps, "greedy_tokens", tokens)
    assert steps.check_graph("graphs", device).ok == (where is None)


def test_a_timing_is_a_rate(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """10**9 bytes in a millisecond are 1,000 GB/s; what does not fit into the memory is left out."""
    monkeypatch.setattr(steps, "time_of", lambda device, call: 1000.0)
    row = steps.measure("copy", open_device("reference"), lambda device: (None, 10**9))
    assert (row.ok, row.microseconds) == (True, 1000.0) and row.gigabytes_per_second == pytest.approx(1000)
    assert steps.measure("large", open_device("reference"), lambda device: None).is_left_out


def test_random_folders_are_models(steps: Any, tmp_path: Path) -> None:
    """They load in the dtype that they are written in, and the devices agree on them."""
    from minipage import LLM

    for dtype in ("float32", "bfloat16"):
        shape = steps.SHAPES["tiny"] | {"torch_dtype": dtype}
        steps.write_model(tmp_path, shape)
        with LLM(str(tmp_path), device="reference", num_blocks=8, max_model_len=32) as llm:
            assert dtype in llm.info.weight_kinds
    row = steps.check_tokens("tokens", open_device("reference"), "tiny", "cpu")
    assert row.ok, row


def test_peers_that_are_not_there_are_left_out(steps: Any) -> None:
    """Nothing of theirs is needed, and nothing of theirs can fail the check."""

    def broken(name: str, device: Device) -> Any:
        raise RuntimeError("no kernel image")

    row = steps.optional("peer", open_device("reference"), broken)
    assert row.ok and row.is_left_out and row.result == "left out: RuntimeError: no kernel image"


def test_what_lacks_a_package_is_left_out(steps: Any) -> None:
    """It is not wrong, and the row says what was missing."""

    def needs_more(name: str, device: Device) -> Any:
        importlib.import_module("no_such_package")

    row = steps.guarded(steps.Step("tokens", needs_more), open_device("reference"))
    assert row.ok and row.is_left_out and row.result == "left out: No module named 'no_such_package'"


@pytest.mark.parametrize("is_right", [True, False])
def test_one_wrong_row_makes_the_exit_status(
    steps: Any, is_right: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The table says how many there were, and what rates are of a copy's."""
    rows = [steps.Row("a", True, ""), steps.Row("b", is_right, ""), steps.left_out("c", "no time")]
    timings = [("copy on the device", 1000.0), ("half", 500.0), ("tenth", 100.0)]
    rows += [steps.Row(name, True, "", 1.0, rate) for name, rate in timings]
    gpu_check = importlib.import_module("gpu_check")
    monkeypatch.setattr(gpu_check, "take", lambda name, shares, seconds, report: [*map(report, rows)])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.check(open_device("reference"), minutes=1) == (0 if is_right else 1)
    table = capsys.readouterr().out
    assert ("5 passed, 0 failed, 1 left out" if is_right else "4 passed, 1 failed, 1 left out") in table
    assert "WRONG b" in table or is_right
    of_copy = {row["name"]: row["of_copy"] for row in json.loads((tmp_path / "gpu_check.json").read_text())["rows"]}
    assert of_copy == {"a": None, "b": None, "c": None, "copy on the device": 1, "half": 0.5, "tenth": 0.1}
