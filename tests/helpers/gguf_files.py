"""GGUF files of tiny Llamas, written by the gguf package from what a Hugging Face folder would hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from helpers.models import HISTORY_CONFIG, history_tensors

from minipage.weights.checkpoint import Checkpoint, open_checkpoint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file, from its Hugging Face name."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def neighbours_from_halves(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """The row order of q and k that the conversion to GGUF makes: dims that rotate together become neighbours."""
    return rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``llama.*`` keys of a Hugging Face config."""
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One metadata pair, its type told by the Python value's."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    *,
    matrix_type: str = "F32",
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    freq_factors: npt.ArrayLike | None = None,
    architecture: str = "llama",
) -> Path:
    """Write Hugging Face ``tensors`` as a GGUF file: vectors in F32, int8 arrays as they are, matrices in ``matrix_type`` or
    in what ``types`` has for their name. ``metadata`` adds keys or changes them; None as a value leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata_of(config), **(metadata or {})}.items():
        if value is not None:
            add_value(writer, key, value)
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(freq_factors, np.float32))
    for name, tensor in tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        ordered = neighbours_from_halves(tensor, config[heads]) if heads else tensor
        type = gguf.GGMLQuantizationType[(types or {}).get(name, matrix_type) if tensor.ndim > 1 else "F32"]
        if tensor.dtype == np.int8:
            writer.add_tensor(gguf_name(name), ordered)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(ordered.astype(np.float32), type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: The history model in a shape that blocks of 32 fit.
CONFIG = {**HISTORY_CONFIG, "head_dim": 16, "intermediate_size": 64}
TENSORS = history_tensors(3, CONFIG)


def opened(path: Path, **options: Any) -> Checkpoint:
    """The history model as a GGUF file, written with these options and opened."""
    return open_checkpoint(str(write_gguf(path / "model.gguf", CONFIG, TENSORS, **options)))
