"""scripts/bench_scheduler.py, run small: what Python does in a step, part by part."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.talker import talker

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))


@pytest.fixture(scope="module")
def bench_scheduler() -> ModuleType:
    """The script as a module."""
    return importlib.import_module("bench_scheduler")


def test_a_step_is_told_part_by_part(bench_scheduler: ModuleType, tmp_path: Path) -> None:
    """Rows for each number of sequences and way to sample; the parts of Python make its share, whose reference is a tenth."""
    path = tmp_path / "rows.json"
    model = str(talker(tmp_path, max_position_embeddings=1024))
    options = ["--model", model, "--device", "cpu", "--sequences", "1", "3", "--steps", "3"]
    assert bench_scheduler.main([*options, "--json", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    for where in ("s1/greedy", "s3/greedy", "s1/sampled", "s3/sampled"):
        python, model_us = (rows[f"{part}_us/{where}"]["value"] for part in ("python", "model"))
        assert all(0 < rows[f"{part}_us/{where}"]["value"] < python for part in bench_scheduler.PYTHON)
        share = rows[f"python_share/{where}"]
        assert share["value"] == pytest.approx(python / (python + model_us)) and share["reference"] == 0.1
    assert len(rows) == 4 * (len(bench_scheduler.PYTHON) + 3)


def test_a_part_has_what_passes_in_it_alone(bench_scheduler: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a part that another one calls is its own, and the other's goes on behind it, errors or not."""
    clock = itertools.count()
    monkeypatch.setattr(bench_scheduler.time, "thread_time", lambda: float(next(clock)))
    watch = bench_scheduler.Stopwatch()

    def fail() -> None:
        raise ValueError

    inner = watch.around("inner", fail)

    def call() -> None:
        for _ in range(2):
            with pytest.raises(ValueError):
                inner()

    cpu, _ = watch.lap(watch.around("outer", call))
    assert (cpu["outer"], cpu["inner"]) == (3, 2)


def test_nothing_to_measure_is_refused(bench_scheduler: ModuleType, capsys: Any) -> None:
    """No steps, or no sequences, with what is allowed."""
    for options in (["--steps", "0"], ["--sequences", "4", "0"]):
        with pytest.raises(SystemExit):
            bench_scheduler.main(options)
        assert "must be at least 1" in capsys.readouterr().err
