"""The models of gpu_check.py: Llamas of random weights, made on the spot, as a folder or straight in a device's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gpu_check_ops import normal

from minipage.device.base import Device
from minipage.kernels.dtypes import STORAGE, convert
from minipage.kernels.ops import PackedWeight
from minipage.models import ModelConfig, parameters
from minipage.models.registry import read_config


def llama(hidden: int, inter: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int, **more: Any) -> dict:
    """A config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


#: The shapes of models: one that the simulator has time for, Qwen3-0.6B's, and Llama-3.1-8B's.
SHAPES: dict[str, dict] = {
    "tiny": llama(32, 48, 2, 4, 2, 8, 61, torch_dtype="float32"),
    "0.6B": llama(1024, 3072, 28, 16, 8, 128, 151936, tie_word_embeddings=True),
    "8B": llama(4096, 14336, 32, 32, 8, 128, 128256),
}


#: Numbers of a tensor that differ, for more take long to draw; and a prime, so that no two rows are the same.
DIFFERENT = 1_000_003


def write_model(folder: Path, shape: dict) -> None:
    """A random model without a tokenizer, as a folder in Hugging Face layout, its tensors in float32 or bfloat16."""
    config = read_config(shape)
    files: dict[str, np.ndarray] = {}
    for parameter in parameters(config).parameters:
        for spec in parameter.tensors:
            values = np.ones(spec.shape, np.float32)
            if parameter.role == "linear":
                few = normal(len(files), min(int(np.prod(spec.shape)), DIFFERENT)) * np.float32(
                    2.3 / np.sqrt(spec.shape[1])
                )
                values = np.resize(few, spec.shape)
            files[spec.name] = values
    write_safetensors(folder / "model.safetensors", files, config.dtype)
    (folder / "config.json").write_text(json.dumps(shape))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """float32 tensors as a safetensors file; the package's own NumPy writer knows no bfloat16."""
    kind, size = ("BF16", 2) if dtype == "bfloat16" else ("F32", 4)
    header, end = {}, 0
    for name, values in tensors.items():
        first, end = end, end + values.size * size
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).data if size == 2 else values.data)


def random_parameters(device: Device, config: ModelConfig, kind: str) -> dict[str, Any]:
    """Parameters of a model by name, with weights of a kind, made on the device: as good as any to time a model with."""
    found: dict[str, Any] = {}
    for parameter in parameters(config).parameters:
        shape = sum(spec.shape[0] for spec in parameter.tensors), *parameter.tensors[0].shape[1:]
        if parameter.role == "vector":
            found[parameter.name] = device.array(np.ones(shape, np.float32))
        else:
            found[parameter.name] = random_weight(device, (shape[0], shape[1]), kind)
    return found


def random_weight(device: Device, shape: tuple[int, int], kind: str) -> PackedWeight:
    """A weight full of small numbers of either sign, in whatever layout the device has."""
    weight = device.ops.empty_weight(shape, kind, device.xp)
    names = {dtype: name for name, dtype in STORAGE.items()}
    for array in weight.arrays:
        pattern = np.arange(251, dtype=np.uint8).view(array.dtype if array.dtype.itemsize == 1 else np.uint8)
        if array.dtype in names:
            pattern = convert(np.array([0.02, -0.02, 0.021, -0.019, 0.018], np.float32), names[array.dtype])
        array[...] = device.xp.resize(device.array(pattern), array.shape)
    return weight
