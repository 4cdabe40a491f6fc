"""What scripts/bench_decode.py measures, by name, and the rows and the table that it makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

from decode_bench.report import Results, Row, table, write_json  # noqa: E402
from decode_bench.roof import ReadRoof  # noqa: E402
from decode_bench.tasks import Task, decode_steps  # noqa: E402


@given(st.integers(1, 512), st.integers(1, 8192), st.integers(0, 64))
def test_tasks_survive_the_way_to_a_worker(batch: int, context: int, steps: int) -> None:
    """As JSON and back."""
    task = Task(batch, context, steps)
    assert Task(**json.loads(json.dumps(task.to_json()))) == task


def test_tasks_are_named_as_rows() -> None:
    """Prefill by its tokens, decode by batch, and by context where it is long; larger batches take fewer steps."""
    assert Task(context=512).name == "prefill/512"
    assert Task(8, steps=32).name == "decode/b8" and Task(1, 4096, 32).name == "decode/b1/c4096"
    assert [decode_steps(batch) for batch in (1, 8, 32, 256)] == [64, 32, 16, 16]


def results() -> Results:
    """Three rounds of a speed and of a time on two sides, and one of a speed on one side."""
    kept = Results()
    for ours, theirs in ((90, 50), (120, 40), (100, 70)):
        kept.add("decode/b1/int4", "minipage", ours, "tok/s")
        kept.add("decode/b1/int4", "llama.cpp", theirs, "tok/s")
        kept.add("ttft/int4", "minipage", ours / 100, "s")
        kept.add("ttft/int4", "llama.cpp", theirs / 100, "s")
    kept.add("read_roof", "minipage", 20.0, "GB/s")
    kept.add("memory/int4", "llama.cpp", 1.0, "MiB")
    return kept


def test_rows_compare_medians_and_bests() -> None:
    """The best is the fastest speed and the shortest time; what minipage has no value of is no row."""
    assert results().rows() == [
        Row("decode/b1/int4", 100, "tok/s", "llama.cpp", 50),
        Row("decode/b1/int4/best", 120, "tok/s", "llama.cpp", 70),
        Row("ttft/int4", 1.0, "s", "llama.cpp", 0.5),
        Row("ttft/int4/best", 0.9, "s", "llama.cpp", 0.4),
        Row("read_roof", 20.0, "GB/s"),
    ]


def test_rows_are_written_as_promised(tmp_path: Path) -> None:
    """Objects with name, value, unit, peer, peer_value and ratio; the table has a line for each name that is no best."""
    rows = results().rows()
    write_json(rows, tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written[0] == {
        "name": "decode/b1/int4", "value": 100, "unit": "tok/s", "peer": "llama.cpp", "peer_value": 50, "ratio": 2.0,
    }  # fmt: skip
    assert written[-1]["peer"] is None and written[-1]["peer_value"] is None and written[-1]["ratio"] is None
    lines = table(rows).splitlines()
    assert lines[1].split() == ["decode/b1/int4", "100.0", "(120.0)", "tok/s", "50.0", "(70.0)", "tok/s", "2.00"]
    assert [line.split()[0] for line in lines[1:]] == ["decode/b1/int4", "ttft/int4", "read_roof"]


def test_the_roof_is_a_plausible_bandwidth() -> None:
    """Somewhere between a slow disk and the fastest memory there is."""
    roof = ReadRoof(threads=2, num_bytes=8 << 20)
    assert 1e8 < roof.measure() < 1e13
    roof.close()
