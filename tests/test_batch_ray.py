"""scripts/batch_ray.py: every prompt of a file is completed once, by any number of workers, however often the job is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.talker import talker

from minipage import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "batch_ray.py"
TIMEOUT = 240  #: seconds for a job that takes some ten, most of them to start Ray
LENGTH = 60  #: tokens of a completion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the talker."""
    return str(talker(tmp_path_factory.mktemp("talker")))


def test_a_job_that_is_killed_goes_on_where_it_was(model: str, tmp_path: Path) -> None:
    """Two workers; after a SIGKILL in the middle, the results that were there stay, the others come, each once and right."""
    prompts = [{"id": i if i % 2 else f"{i}", "prompt": f"{i}~" if i % 3 else f"{i}>"} for i in range(60)]
    prompts.append({"id": "chat", "messages": [{"role": "user", "content": "Capital>"}]})
    prompts.append({"id": "short", "prompt": "1~", "params": {"max_tokens": 3, "n": 2}})
    prompts.append({"id": "long", "prompt": "x" * 5000})
    file, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)))
    options = {"model": model, "device": "reference", "num-blocks": 64, "max-num-seqs": 2, "max-tokens": LENGTH}
    command = [sys.executable, str(SCRIPT), str(file), str(results), "--num-workers=2", "--cpus-per-worker=1"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as job:
        end = time.monotonic() + TIMEOUT
        while len(lines_of(results)) < 10 and job.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        job.send_signal(signal.SIGKILL)
    before = lines_of(results)
    assert 10 <= len(before) < len(prompts), "the job was to be killed in the middle"
    with open(results, "a") as unfinished:
        unfinished.write('{"id": 1, "outp')

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    lines = lines_of(results)
    assert lines[: len(before)] == before
    found = {(type(r["id"]), r["id"]): r for r in map(json.loads, lines)}
    assert len(found) == len(lines) == len(prompts)
    assert "max_model_len" in found.pop((str, "long"))["error"]
    with LLM(model, device="reference", num_blocks=64) as llm:
        for prompt in prompts[:-1]:
            params = SamplingParams(temperature=0, **{"max_tokens": LENGTH, **prompt.get("params", {})})
            ask = (
                llm.chat(prompt["messages"], params) if "messages" in prompt else llm.generate(prompt["prompt"], params)
            )
            expected = [list(completion.token_ids) for completion in ask[0].outputs]
            assert [o["token_ids"] for o in found[type(prompt["id"]), prompt["id"]]["outputs"]] == expected

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert again.returncode == 0 and lines_of(results) == lines


def lines_of(file: Path) -> list[str]:
    """The lines that are there whole."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def test_a_worker_that_cannot_start_is_told(tmp_path: Path) -> None:
    """The job ends with the reason, and what is left."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "prompt": "a"}\n')
    command = [
        sys.executable,
        str(SCRIPT),
        str(file),
        str(tmp_path / "results.jsonl"),
        f"--model={tmp_path / 'nothing'}",
    ]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2
    assert "nothing" in done.stderr and "a worker ended" in done.stderr
    assert "error: 1 of 1 prompts are left, and no worker served any" in done.stderr
