"""What 4-bit weights should be most exact for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checks import greedy_params
from helpers.gguf_files import write_gguf
from helpers.models import HISTORY_CONFIG, history_tensors, write_folder

from minipage import LLM
from minipage.kernels import reference
from minipage.models import parameters
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.importance import input_importance
from minipage.weights.kinds import weight_kinds

CONFIG = {**HISTORY_CONFIG, "intermediate_size": 64, "bos_token_id": 7, "attention_bias": True, "mlp_bias": True}
TENSORS = history_tensors(3, CONFIG)
BIASES = {
    name.replace(".weight", ".bias"): np.linspace(-1, 1, len(tensor), dtype=np.float32)
    for name, tensor in TENSORS.items()
    if "_proj.weight" in name
}


def importance(path: Path, quantization: str | None = "int4") -> dict[str, Any]:
    """What the loader finds out about a checkpoint."""
    checkpoint = open_checkpoint(str(path))
    config, source = checkpoint.model_config(), checkpoint.source
    plan = parameters(config)
    kinds = weight_kinds(plan, source, config.dtype, "auto", quantization)
    return input_importance(plan, source, kinds, config)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new"])
def test_it_is_what_the_first_token_brings(activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 and the squares, at a mean of 1, of what the engine itself gives to each linear layer for a text of one token."""
    path = write_folder(tmp_path, {**CONFIG, "hidden_act": activation}, {**TENSORS, **BIASES})
    inputs: list[np.ndarray] = []
    linear = reference.linear

    def spy(out: Any, x: np.ndarray, *rest: Any) -> None:
        inputs.append(x[0].copy())
        linear(out, x, *rest)

    monkeypatch.setattr(reference, "linear", spy)
    with LLM(str(path), device="reference", num_blocks=8) as llm:
        llm.generate([[7]], greedy_params(1), use_tqdm=False)
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in ("qkv", "o", "gate_up", "down")]
    found = importance(path)
    assert found.keys() == set(names)
    for name, x in zip(names, inputs[: len(names)], strict=True):
        np.testing.assert_allclose(found[name], 1 + x**2 / np.mean(x**2), rtol=1e-4, err_msg=name)


def test_it_is_not_sought_in_vain(tmp_path: Path) -> None:
    """Nothing is read where no matrix is quantised to 4 bits: in int8, or where the file has 4 bits already."""
    assert importance(write_folder(tmp_path / "folder", HISTORY_CONFIG, TENSORS), "int8") == {}
    config = {**HISTORY_CONFIG, "intermediate_size": 64}
    assert importance(write_gguf(tmp_path / "model.gguf", config, TENSORS, matrix_type="Q4_1")) == {}


def test_numbers_that_overflow_do_no_harm(tmp_path: Path) -> None:
    """Where the first token's activations are not finite, inputs weigh alike rather than not at all."""
    tensors = {name: tensor * (1e30 if "o_proj" in name else 1) for name, tensor in TENSORS.items()}
    for weights in importance(write_folder(tmp_path, {**HISTORY_CONFIG, "intermediate_size": 64}, tensors)).values():
        assert np.all(np.isfinite(weights)) and np.all(weights >= 1)
