"""The files that REF reads: a checkpoint folder or a GGUF file, whole and as float32, with not a line shared with minipage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Array = Any  #: a NumPy array


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """config.json and the tensors of model.safetensors, as float32."""
    config = json.loads((path / "config.json").read_text())
    data = (path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        stored = np.frombuffer(
            data[start + begin : start + end], {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry["dtype"]]
        )
        if entry["dtype"] == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = stored.astype(np.float32).reshape(entry["shape"])
    return config, tensors


GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """A llama GGUF file as config and float32 tensors under their Hugging Face names."""
    import gguf

    reader = gguf.GGUFReader(path)

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field("llama." + key)
        return default if found is None else found.contents()

    heads = field("attention.head_count")
    config = {
        "hidden_size": field("embedding_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("rope.dimension_count"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "max_position_embeddings": field("context_length"),
    }
    tensors: dict[str, Array] = {}
    for tensor in reader.tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        stem, _, kind = tensor.name.rpartition(".")
        if stem == "rope_freqs":
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], "divisors": values}
            continue
        block = stem.split(".")
        if block[-1] in ("attn_q", "attn_k"):
            values = halves_from_pairs(
                values, config["num_attention_heads" if block[-1] == "attn_q" else "num_key_value_heads"]
            )
        prefix = f"model.layers.{block[1]}." if block[0] == "blk" else ""
        tensors[f"{prefix}{GGUF_NAMES[block[-1]]}.{kind}"] = values
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config, tensors


def halves_from_pairs(rows: Array, num_heads: int) -> Array:
    """Undo GGUF's row order, in which the two dims that rotate together are neighbours."""
    per_head = len(rows) // num_heads
    order = np.arange(len(rows)).reshape(num_heads, per_head // 2, 2).swapaxes(1, 2).reshape(-1)
    return rows[order]
