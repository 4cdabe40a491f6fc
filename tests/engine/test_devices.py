"""A tiny model says the same on every device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import models, ref
from helpers.checks import assert_idle_and_whole, greedy_params, logprob_matrix

from minipage import LLM, InvalidArgumentError
from minipage.config import EngineConfig
from minipage.device import open_device

SEED = 10
NEW = 6
VOCAB = models.VOCAB_SIZE
LENGTHS = (1, 4, 7)


def run(device: str, folder: str) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens, and log probabilities of the first of them, of three prompts together, computed in chunks."""
    with LLM(folder, device=device, dtype="float32", block_size=4, num_blocks=16, max_num_batched_tokens=5) as llm:
        prompts = [models.history_prompt(SEED, length) for length in LENGTHS]
        outs = llm.generate(prompts, greedy_params(NEW, logprobs=VOCAB), use_tqdm=False)
        assert_idle_and_whole(llm)
    rows = [out.outputs[0].logprobs[0] for out in outs]
    return [list(out.outputs[0].token_ids) for out in outs], logprob_matrix(rows, VOCAB).tolist()


@pytest.fixture(scope="module")
def expected(oracle: Callable[[int], ref.Reference]) -> tuple[list[list[int]], list[list[float]]]:
    """What REF says."""
    prompts = [models.history_prompt(SEED, length) for length in LENGTHS]
    assert min(ref.smallest_gap(oracle(SEED), prompt, NEW) for prompt in prompts) > 0.002
    return (
        [ref.greedy(oracle(SEED), prompt, NEW) for prompt in prompts],
        [ref.log_softmax(oracle(SEED).logits(prompt)[-1]).tolist() for prompt in prompts],
    )


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_host_devices(
    history: Callable[[int], Path], expected: tuple[list[list[int]], list[list[float]]], device: str
) -> None:
    """Numba kernels and plain NumPy give REF's tokens and log probabilities."""
    tokens, logprobs = run(device, str(history(SEED)))
    assert tokens == expected[0]
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("device", "setting"), [("cuda-sim", "NUMBA_ENABLE_CUDASIM"), ("cpu", "NUMBA_DISABLE_JIT")])
def test_settings_of_a_process(
    history: Callable[[int], Path], expected: tuple[list[list[int]], list[list[float]]], device: str, setting: str
) -> None:
    """So do the CUDA kernels in Numba's simulator, and the CPU kernels as plain Python; each takes a process of its own."""
    if device == "cuda-sim":
        pytest.importorskip("numba_cuda")
    code = "import json, sys, test_devices; print(json.dumps(test_devices.run(*sys.argv[1:])))"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, device, str(history(SEED))],
        env=os.environ | {setting: "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    tokens, logprobs = json.loads(done.stdout.splitlines()[-1])
    assert tokens == expected[0]
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-4, rtol=0)


def test_config_and_device_allow_as_many_threads() -> None:
    """What the one takes the other does, and both refuse the next."""
    open_device("cpu", EngineConfig(num_threads=1024).num_threads).close()
    for refuse in (lambda: EngineConfig(num_threads=1025), lambda: open_device("cpu", 1025)):
        with pytest.raises(InvalidArgumentError, match=r"num_threads=1025 is not allowed.* 1 to 1024"):
            refuse()
