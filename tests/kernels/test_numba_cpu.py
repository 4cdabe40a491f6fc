"""What compilation and threads must not change in the CPU kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kernels import CPU, PAGE_KINDS, assert_close, assert_same_bits, normal
from helpers.paged import Problem

from minipage.device import open_device
from minipage.kernels import cpu
from minipage.kernels.dtypes import to_float32
from minipage.kernels.ops import ACTIVATIONS, WEIGHT_KINDS

Array = Any


def everything(tokens: int, size: int, context: int) -> dict[str, Array]:
    """The results of all ops that are compiled, by name."""
    x, weight, bias = normal(1, tokens, size), normal(2, size), normal(3, size)
    results: dict[str, Array] = {
        "rms_norm": CPU.result("rms_norm", x.shape, x, weight, 1e-5),
        "layer_norm": CPU.result("layer_norm", x.shape, x, weight, bias, 1e-5),
    }
    for activation in ACTIVATIONS:
        gate_up = np.concatenate([x, x], axis=1) * 4
        results[activation] = CPU.result("gated_activation", x.shape, gate_up, activation)
    for kind in WEIGHT_KINDS:
        results[f"linear {kind}"] = CPU.result("linear", x.shape, x, CPU.weight(normal(4, size, size), kind), bias)
    for kind in PAGE_KINDS:
        for window, sinks in ((0, 0), (1, 0), (7, 0), (7, 5)):
            sight = {"window": window, "sinks": sinks}
            problem = Problem(6, 2, 20, 4, (context, 3), (context, 1), **sight, kind=kind, fill=np.nan)
            results[f"attention {kind} {window} {sinks}"] = problem.attend(CPU)
        results |= rope_and_cache(normal(5, tokens, 6, size), kind)
    heads, tables = normal(8, tokens, 2, size), (normal(6, tokens, size // 2), normal(7, tokens, size // 2))
    results["rope"] = CPU.result("rope", heads.shape, heads, *tables, np.arange(tokens, dtype=np.int32), tokens // 2)
    return results


def rope_and_cache(qkv: Array, kind: str) -> dict[str, Array]:
    """The buffer that is rotated, and the pages that are written; those of int8 as their bytes."""
    tokens, _, size = qkv.shape
    zeros = np.zeros((tokens, 2, 1, size), np.float32)
    pages = CPU.key_pages(zeros, kind), CPU.value_pages(zeros, kind)
    tables = normal(6, tokens, size // 2), normal(7, tokens, size // 2)
    order = np.arange(tokens)
    CPU.run(
        "rope_and_cache",
        qkv[:, :2],
        qkv[:, 2:4],
        qkv[:, 4:],
        *tables,
        order.astype(np.int32),
        *pages,
        order.astype(np.int64),
    )
    keys, values = (page if kind == "int8" else to_float32(page) for page in pages)
    return {f"rope {kind}": qkv, f"keys {kind}": keys, f"values {kind}": values}


def test_threads_change_no_bit() -> None:
    """One to four threads give the same bits, on shapes that are shared among them."""
    results = []
    for threads in (1, 2, 3, 4):
        results.append(everything_on(threads))
    for other in results[1:]:
        for name, expected in results[0].items():
            assert_same_bits(other[name], expected)


def everything_on(threads: int) -> dict[str, Array]:
    """The results of all ops on a number of threads."""
    CPU.device = open_device("cpu", num_threads=threads)
    try:
        return everything(tokens=40, size=576, context=300)
    finally:
        CPU.device = open_device("cpu")


def test_compiled_is_what_python_computes(tmp_path: Path) -> None:
    """With Numba disabled the kernels are plain Python, and give the same numbers."""
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}; import numpy, test_numba_cpu; "
        f"numpy.savez({str(tmp_path / 'python.npz')!r}, **test_numba_cpu.small())"
    )
    folder = Path(__file__).parent
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, check=True, timeout=300)
    with np.load(tmp_path / "python.npz") as python:
        for name, compiled in small().items():
            assert_close(compiled, python[name], 1e-5)


def small() -> dict[str, Array]:
    """The results of all ops on shapes that plain Python has time for; and of what is not finite."""
    return everything(tokens=7, size=40, context=20) | not_finite()


def not_finite() -> dict[str, Array]:
    """What quantises numbers, given NaN and infinities, in a group of 32 and in what is left of a row behind it."""
    x, qkv = normal(1, 4, 40), normal(5, 4, 6, 40)
    x[0, 3] = x[1, 39] = qkv[0, 4, 0] = np.nan
    x[2, 31] = x[3, 32] = qkv[1, 5, 39] = np.inf
    results = {
        f"linear {kind} of what is not finite": CPU.result(
            "linear", x.shape, x, CPU.weight(normal(4, 40, 40), kind), None
        )
        for kind in WEIGHT_KINDS
    }
    pages = rope_and_cache(qkv, "int8")
    return results | {f"{name} of what is not finite": page for name, page in pages.items()}


def test_arrays_that_do_not_fit_are_refused() -> None:
    """A wrong dtype or layout raises TypeError, where compiled code would read other memory."""
    x, weight = normal(1, 4, 8), normal(2, 8)
    for wrong in (x.astype(np.float64), x[:, ::2], x[0]):
        with pytest.raises(TypeError, match="an array of float32 with"):
            cpu.rms_norm(np.empty_like(x), wrong, weight, 1e-5)


def test_arrays_that_are_read_may_be_read_only() -> None:
    """Weights of norms, biases and rotary tables may be read-only views, of a file for instance."""
    x, weight = normal(1, 4, 8), normal(2, 8)
    expected = CPU.result("rms_norm", x.shape, x, weight, 1e-5)
    weight.flags.writeable = False
    out = np.empty_like(x)
    cpu.rms_norm(out, x, weight, 1e-5)
    assert_same_bits(out, expected)
    cpu.linear(np.empty((4, 8), np.float32), x, CPU.weight(normal(3, 8, 8), "float32"), weight)
