"""A GGUF file's metadata in the form of Hugging Face's ``config.json`` and ``generation_config.json``.

Every function raises ValueError that names the GGUF key, its value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..models.fields import MAX_LAYERS, Fields, integer, number, optional_integer, refuse
from .gguf_header import Header

ARCHITECTURE = "llama"
SCALING = "llama.rope.scaling."
SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")
YARN_KEYS = ("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")

#: Keys that change the arithmetic in a way that the decoder does not follow, but for these values.
NEUTRAL = {
    "llama.expert_count": (0,),
    "llama.attention.causal": (True,),
    "llama.attention.scale": (0.0,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.max_alibi_bias": (0.0,),
    "llama.attn_logit_softcapping": (0.0,),
    "llama.final_logit_softcapping": (0.0,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.use_parallel_residual": (False,),
    "split.count": (0, 1),
}

#: Texts of tokens that end a turn or a document, whatever the model: the ones that llama.cpp takes for it.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<end_of_utterance>",
)
ADDED_TYPES = (3, 4)  #: tokenizer.ggml.token_type of control and user-defined tokens


def translate_config(header: Header, freq_factors: list[float] | None) -> dict[str, Any]:
    """The ``config.json`` of a llama file; ``freq_factors`` are the values of ``rope_freqs.weight``, if it has one.

    ``dtype`` is that of K and V where nobody says otherwise: float32 where a matrix is, else bfloat16 where one is, else
    float16, which is what llama.cpp gives models whose weights are quantised.
    """
    metadata, tensors = header.metadata, header.tensors
    check_supported(metadata)
    heads = per_layer(metadata, "llama.attention.head_count")
    hidden = integer(metadata, "llama.embedding_length")
    dim = integer(metadata, "llama.attention.key_length", hidden // heads)
    if integer(metadata, "llama.attention.value_length", dim) != dim:
        raise refuse("llama.attention.value_length", metadata["llama.attention.value_length"], f"as key_length: {dim}")
    window = optional_integer(metadata, "llama.attention.sliding_window", minimum=0) or None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary_size(header),
        "hidden_size": hidden,
        "intermediate_size": per_layer(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": integer(metadata, "llama.block_count", maximum=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": per_layer(metadata, "llama.attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": integer(metadata, "llama.context_length"),
        "rms_norm_eps": number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": translate_rope(metadata, dim, freq_factors),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "dtype": matrix_dtype(header),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def translate_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that end a generation: those that the file names as end of sequence, turn or message (``eos``, ``eot``,
    ``eom``), and every control or user-defined token whose text is one of ``END_TEXTS``. A chat model's file often names
    only one of the two that it ends with, as SmolLM2's names <|im_end|> and not <|endoftext|>."""
    named = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = {token_id for key in named if (token_id := optional_integer(metadata, key, minimum=0)) is not None}
    texts, types = (list_of_tokens(metadata, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    ids |= {
        i for i, (text, type) in enumerate(zip(texts, types, strict=False)) if type in ADDED_TYPES and text in END_TEXTS
    }
    return {"eos_token_id": sorted(ids)}


def list_of_tokens(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """A list with an entry a token, [] where the key is absent."""
    value = metadata.get(key, [])
    if not isinstance(value, list):
        raise refuse(key, value, "a list with an entry a token")
    return value


def check_supported(metadata: Mapping[str, Any]) -> None:
    """Refuse another architecture, and keys that would change what the model computes."""
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise refuse("general.architecture", architecture, ARCHITECTURE)
    for key, neutral in NEUTRAL.items():
        if key in metadata and metadata[key] not in neutral:
            raise refuse(key, metadata[key], f"absent, or {' or '.join(map(str, neutral))}")


def per_layer(metadata: Fields, key: str, default: int | None = None) -> int:
    """An integer that may be given as one or as a list with one a layer, all equal."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return integer(metadata, key, default)
    if not value or any(v != value[0] for v in value):
        raise refuse(key, value, "the same number in all layers")
    return integer({key: value[0]}, key)


def vocabulary_size(header: Header) -> int:
    """How many tokens there are: the vocabulary's, else as the file says, else as many as have an embedding."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    embedding = header.tensors.get("token_embd.weight")
    return integer(header.metadata, "llama.vocab_size", embedding.shape[0] if embedding else None)


def matrix_dtype(header: Header) -> str:
    """The widest of the float types of the matrices, and float16 where all are quantised."""
    types = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    return "float32" if "F32" in types else "bfloat16" if "BF16" in types else "float16"


# ---- rope ----------------------------------------------------------------------------------------------------------


def translate_rope(metadata: Fields, head_dim: int, freq_factors: list[float] | None) -> dict[str, Any]:
    """``rope_parameters``: none, linear or yarn by the scaling keys, or the divisors of ``rope_freqs.weight``.

    As in llama.cpp, a factor without a type is one of linear scaling, and none where it is 0.
    """
    rotary_dim = integer(metadata, "llama.rope.dimension_count", head_dim)
    rule: dict[str, Any] = {
        "rope_theta": number(metadata, "llama.rope.freq_base", 10000.0),
        "partial_rotary_factor": rotary_dim / head_dim,
    }
    scale = metadata.get(SCALING + "factor", metadata.get("llama.rope.scale_linear", 0))  # which the first files have
    kind = metadata.get(SCALING + "type", "linear" if scale != 0 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise refuse(SCALING + "type", kind, "none, linear, yarn")
    allowed = (*SCALING_KEYS, *YARN_KEYS) if kind == "yarn" else SCALING_KEYS
    for key in metadata:
        if key.startswith(SCALING) and key.removeprefix(SCALING) not in allowed:
            raise refuse(key, metadata[key], f"with type {kind}: {', '.join(allowed)}")
    if freq_factors is not None:
        if kind != "none":
            raise refuse(SCALING + "type", kind, "none beside a tensor rope_freqs.weight")
        return {**rule, "rope_type": "freq_factors", "freq_factors": freq_factors}
    if kind == "none":
        return {**rule, "rope_type": "default"}
    factor = number(metadata, SCALING + "factor", metadata.get("llama.rope.scale_linear"))
    if kind == "linear":
        return {**rule, "rope_type": "linear", "factor": factor}
    return {**rule, **translate_yarn(metadata, factor)}


def translate_yarn(metadata: Fields, factor: float) -> dict[str, Any]:
    """YaRN's numbers. In GGUF the attention factor multiplies 0.1 ln(factor) + 1 rather than replacing it."""
    attention = number(metadata, SCALING + "attn_factor", 1.0) * number(metadata, SCALING + "yarn_attn_factor", 1.0)
    length = integer(metadata, "llama.context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": integer(metadata, SCALING + "original_context_length", length),
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        "beta_fast": number(metadata, SCALING + "yarn_beta_fast", 32.0),
        "beta_slow": number(metadata, SCALING + "yarn_beta_slow", 1.0),
    }
