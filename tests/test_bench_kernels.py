"""scripts/bench_kernels.py, run small: what it compares, and what it does not."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))


@pytest.fixture(scope="module")
def bench_kernels() -> ModuleType:
    """The script as a module."""
    return importlib.import_module("bench_kernels")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_are_compared(bench_kernels: ModuleType, tmp_path: Path, dtype: str) -> None:
    """Rows for each block size, context and batch."""
    path = tmp_path / "rows.json"
    options = ["--contexts", "32", "--block-sizes", "8", "16", "--batches", "1", "3", "--rounds", "3", "--dtype", dtype]
    assert bench_kernels.main([*options, "--json", str(path)]) == 0
    values = {row["name"]: row["value"] for row in json.loads(path.read_text())}
    for size, where in itertools.product((8, 16), ("c32", "c32/batch3")):
        assert values[f"attention/paged_over_contiguous/b{size}/{where}"] > 0
    assert len(values) == 2 * (1 + 2 * 2)


def test_kernels_that_differ_are_not_compared(bench_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of two different results would say nothing."""
    right = bench_kernels.paged

    def wrong(device: Any, problem: Any, block_size: int) -> Any:
        call, out = right(device, problem, block_size)
        return (lambda: (call(), out.__iadd__(0.01))), out

    monkeypatch.setattr(bench_kernels, "paged", wrong)
    device = bench_kernels.open_device("cpu")
    with pytest.raises(AssertionError):
        list(bench_kernels.compare(device, bench_kernels.Problem(1, 32, "float32"), [8], 2))


def test_contexts_have_to_be_whole_blocks(bench_kernels: ModuleType, capsys: Any) -> None:
    """Otherwise the two would not hold the same tokens."""
    with pytest.raises(SystemExit):
        bench_kernels.main(["--contexts", "100", "--block-sizes", "16"])
    assert "100 is none of 16" in capsys.readouterr().err
