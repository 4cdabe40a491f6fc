"""The traces that scripts/bench_memory.py replays: made up, or read from files."""

from __future__ import annotations

import gzip
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

from memory_bench import trace  # noqa: E402
from memory_bench.trace import ALPACA, SHAREGPT, made_up  # noqa: E402


@pytest.fixture(scope="module")
def bench_memory() -> ModuleType:
    """The script as a module."""
    return importlib.import_module("bench_memory")


@pytest.mark.parametrize("workload", [SHAREGPT, ALPACA])
def test_made_up_lengths_have_the_means_of_the_paper(workload: trace.Workload) -> None:
    """Whatever the seed: means within half a percent, a spread like the dataset's, nothing longer than allowed, arrivals in
    order and at the rate; the seed changes the order.
    """
    traces = [made_up(workload, 400, 2048, seed) for seed in (0, 1)]
    for each in traces:
        prompts = np.array([item.num_prompt_tokens for item in each])
        outputs = np.array([item.num_output_tokens for item in each])
        assert prompts.mean() == pytest.approx(workload.prompt.mean, rel=0.005)
        assert outputs.mean() == pytest.approx(workload.output.mean, rel=0.005)
        assert outputs.std() == pytest.approx(workload.output.std, rel=0.1)
        assert max(item.num_tokens for item in each) <= 2048 and min(prompts.min(), outputs.min()) >= 1
        assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.1
        arrivals = [item.arrival for item in each]
        assert arrivals == sorted(arrivals) and arrivals[0] == 0
        assert 400 / arrivals[-1] == pytest.approx(workload.rate, rel=0.2)
    assert traces[0] != traces[1]
    assert traces[0] == made_up(workload, 400, 2048, 0)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9,3000,1\n"
AZURE += "2023-11-16 18:16:46.6805900,7,3\n"
MOONCAKE = '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [8, 9]}\n'
MOONCAKE += '{"timestamp": 3500, "input_length": 520, "output_length": 6, "hash_ids": [8, 7]}\n'


@pytest.mark.parametrize("zipped", [False, True])
def test_files_are_read(tmp_path: Path, zipped: bool) -> None:
    """Azure's CSV and Mooncake's JSON lines, gzipped or not: seconds from the first request; what is too long is left out."""
    paths = []
    for name, text in (("azure.csv", AZURE), ("mooncake.jsonl", MOONCAKE)):
        path = tmp_path / (name + (".gz" if zipped else ""))
        path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        paths.append(path)
    azure, mooncake = (trace.read(path, 2048) for path in paths)
    assert [(item.arrival, item.num_prompt_tokens, item.num_output_tokens) for item in azure] == [
        (0, 374, 44),
        (60, 7, 3),
    ]
    assert azure[0].prompt_token_ids[:7] != azure[1].prompt_token_ids
    assert [item.arrival for item in mooncake] == [0, 2.5]
    first, second = (item.prompt_token_ids for item in mooncake)
    assert (len(first), len(second)) == (700, 520)
    assert first[:512] == second[:512] and first[512] != second[512]


@pytest.mark.parametrize(
    "text", ["no trace at all\n", "TIMESTAMP,ContextTokens\n1,2\n", "{broken\n", '{"timestamp": 1}\n', ""]
)
def test_other_files_are_refused(bench_memory: ModuleType, tmp_path: Path, text: str, capsys: Any) -> None:
    """One line that names the file, and exit status 2."""
    path = tmp_path / "trace.txt"
    path.write_text(text)
    assert bench_memory.main(["--trace", str(path), "--parts", "waste"]) == 2
    assert f"bench_memory.py: error: the trace {path}" in capsys.readouterr().err
