"""Tiny checkpoints in the layout of the Hugging Face hub, written from nothing: what the engine's tests load.

``history_model`` is a random Llama in which every past token matters, so a single wrong KV slot changes its output.
``script_model`` says whatever a table tells it to: the logits after token i are exactly row i. It has no memory at all.
Neither has a tokenizer unless one is given: prompts are token ids.
"""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[Any]]

VOCAB_SIZE = 61  #: of the history model
SAFE_SEEDS = (3, 5, 6, 10, 11)  #: the two best tokens of its greedy steps never come closer than 0.05 with these

HISTORY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


# ---- writing a folder ------------------------------------------------------------------------------------------------


def bfloat16_bits(x: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Finite float32 values as bfloat16 bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], dtype: str = "float32") -> None:
    """Write ``tensors`` as one safetensors file in ``dtype`` (float32, float16 or bfloat16), byte by byte."""
    label = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        stored = bfloat16_bits(tensor) if dtype == "bfloat16" else tensor.astype(dtype)
        chunk = stored.tobytes()
        header[name] = {"dtype": label, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(chunk)]}
        chunks.append(chunk)
        offset += len(chunk)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    *,
    dtype: str = "float32",
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Write a checkpoint folder at ``path`` and return it; a ``tokenizer`` folder's JSON files are copied along."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=1))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    write_safetensors(path / "model.safetensors", tensors, dtype)
    if tokenizer is not None:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, path / file)
    return path


# ---- F1: every past token matters ------------------------------------------------------------------------------------


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Llama of this config has, by its name in the file, in the order in which F1 draws them."""
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    value = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", query), ("k", value), ("v", value)):
            shapes[layer + f"self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (inter, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inter)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def history_tensors(seed: int, config: Mapping[str, Any] = HISTORY_CONFIG) -> Tensors:
    """The history model's float32 tensors: norms 1, everything else N(0, 0.4) from ``default_rng(seed)``."""
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else rng.normal(0.0, 0.4, shape).astype(np.float32)
        for name, shape in llama_shapes(config).items()
    }


def history_model(
    path: Path,
    seed: int,
    *,
    dtype: str = "float32",
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
    **overrides: Any,
) -> Path:
    """Write the history model (F1) at ``path``; ``overrides`` change its config.json, and its tensors with it."""
    config = {**HISTORY_CONFIG, **overrides}
    return write_folder(
        path,
        config,
        history_tensors(seed, config),
        dtype=dtype,
        generation_config=generation_config,
        tokenizer=tokenizer,
    )


def history_prompt(seed: int, length: int = 13, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The prompt that goes with ``history_model(seed)``; the seeds of SAFE_SEEDS are safe at length 13."""
    return [int(i) for i in np.random.default_rng(100 + seed).integers(0, vocab_size, length)]


# ---- F2: says what a table tells it to -------------------------------------------------------------------------------


def script_model(
    path: Path,
    table: npt.ArrayLike,
    *,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
    **overrides: Any,
) -> Path:
    """Write a Llama (F2) whose logits after token i are exactly row i of the finite ``table`` [V, V], in float32.

    Attention and MLP add nothing (o_proj and down_proj are zero) and embeddings are one-hot, so the final norm
    multiplies by sqrt(hidden), which the head divides away. hidden is a power of four, so that both are exact.
    """
    rows = np.asarray(table, dtype=np.float32)
    vocab = len(rows)
    hidden = 16
    while hidden < vocab:
        hidden *= 4
    config = {
        **HISTORY_CONFIG,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-12,
        **overrides,
    }
    tensors = history_tensors(0, config)
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 0
    tensors["model.embed_tokens.weight"] = np.eye(vocab, hidden, dtype=np.float32)
    tensors["lm_head.weight"] = np.zeros((vocab, hidden), np.float32)
    tensors["lm_head.weight"][:, :vocab] = rows.T / np.float32(np.sqrt(hidden))
    return write_folder(path, config, tensors, generation_config=generation_config, tokenizer=tokenizer)


def script_table(vocab_size: int, *chains: Sequence[int], strength: float = 20.0) -> npt.NDArray[np.float32]:
    """A table for :func:`script_model` in which each token of a chain is followed by the next, ``strength`` ahead."""
    table = np.zeros((vocab_size, vocab_size), np.float32)
    for chain in chains:
        for token, following in itertools.pairwise(chain):
            others = np.flatnonzero(table[token])
            if others.size and others[0] != following:
                raise ValueError(f"token {token} would be followed by both {others[0]} and {following}")
            table[token, following] = strength
    return table


def edit_json(path: Path, changes: Mapping[str, Any], remove: Iterable[str] = ()) -> None:
    """Change keys of a JSON file in place."""
    content = {**json.loads(path.read_text()), **changes}
    for key in remove:
        content.pop(key, None)
    path.write_text(json.dumps(content))
