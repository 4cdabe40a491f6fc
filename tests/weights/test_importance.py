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
from minipage.weights.importance import input_importance, sample_tokens
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


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_act": "gelu", "bos_token_id": None},
        {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 5,
            "attention_bias": False,
        },
    ],
    ids=["llama", "gelu", "gelu_new, partly rotated", "window"],
)
def test_it_is_what_the_engine_reads(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean squares of what the engine gives to each linear layer for the same tokens, the first apart from the others."""
    config = {**CONFIG, **config}
    tensors = {**TENSORS, **(BIASES if config["attention_bias"] else {n: b for n, b in BIASES.items() if "mlp" in n})}
    path = write_folder(tmp_path, config, tensors)
    inputs: dict[int, list[np.ndarray]] = {}  # by weight, in the order in which they are used
    linear = reference.linear

    def spy(out: Any, x: np.ndarray, weight: Any, bias: Any) -> None:
        inputs.setdefault(id(weight), []).append(x.copy())
        linear(out, x, weight, bias)

    checkpoint = open_checkpoint(str(path))
    tokens = sample_tokens(checkpoint.model_config())
    assert len(tokens) == 64
    assert config["bos_token_id"] in (None, tokens[0])
    checkpoint.close()
    monkeypatch.setattr(reference, "linear", spy)
    with LLM(str(path), device="reference", num_blocks=16, enable_prefix_caching=False) as llm:
        llm.generate([tokens], greedy_params(1), use_tqdm=False)
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in ("qkv", "o", "gate_up", "down")]
    found = importance(path)
    assert found.keys() == set(names)
    for name, steps in zip(names, inputs.values(), strict=False):
        x = np.concatenate(steps)
        assert len(x) == len(tokens)
        first, others = x[0] ** 2, np.mean(x[1:] ** 2, axis=0)
        expected = first / first.mean() + others / others.mean() + 0.05
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, err_msg=name)


def test_a_model_of_few_positions(tmp_path: Path) -> None:
    """The text is no longer than the model allows."""
    path = write_folder(tmp_path, {**CONFIG, "max_position_embeddings": 9}, {**TENSORS, **BIASES})
    assert len(sample_tokens(open_checkpoint(str(path)).model_config())) == 9
    assert importance(path)["layers.1.down"].shape == (64,)


def test_it_is_not_sought_in_vain(tmp_path: Path) -> None:
    """Nothing is read where no matrix is quantised to 4 bits: in int8, or where the file has 4 bits already."""
    assert importance(write_folder(tmp_path / "folder", HISTORY_CONFIG, TENSORS), "int8") == {}
    config = {**HISTORY_CONFIG, "intermediate_size": 64}
    assert importance(write_gguf(tmp_path / "model.gguf", config, TENSORS, matrix_type="Q4_1")) == {}


def test_numbers_that_overflow_do_no_harm(tmp_path: Path) -> None:
    """Where activations are not finite, inputs weigh something all the same."""
    tensors = {name: tensor * (1e30 if "o_proj" in name else 1) for name, tensor in TENSORS.items()}
    for weights in importance(write_folder(tmp_path, {**HISTORY_CONFIG, "intermediate_size": 64}, tensors)).values():
        assert np.all(np.isfinite(weights)) and np.all(weights > 0)
