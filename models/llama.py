"""Llama 1 to 3.x and what shares its shape: SmolLM, TinyLlama, and Mistral, which adds a window to every layer."""

from __future__ import annotations

from .config import ModelConfig
from .fields import (
    MAX_LAYERS,
    Fields,
    flag,
    integer,
    number,
    read_activation,
    read_dtype,
    read_head_dim,
    read_kv_heads,
    read_token_ids,
    read_windows,
)
from .plan import Parameter, Plan, Split, TensorSpec
from .rope_config import read_max_length, read_rope

ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM", "MistralForCausalLM")

#: Buffers that some files carry and every implementation computes.
IGNORED = (r".*rotary_emb\.inv_freq", r".*attn\.(masked_)?bias")


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    """The config of a Llama or Mistral from its ``config.json``; keys left out have the defaults of these classes.

    Raises ValueError naming the key, its value and what is allowed.
    """
    hidden_size = integer(fields, "hidden_size")
    num_layers = integer(fields, "num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = integer(fields, "num_attention_heads")
    dim = read_head_dim(fields, hidden_size, num_heads)
    mistral = architecture == "MistralForCausalLM"
    positions = integer(fields, "max_position_embeddings", 131072 if mistral else 2048)
    rope = read_rope(fields, dim, positions)
    bias = flag(fields, "attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read_kv_heads(fields, num_heads),
        head_dim=dim,
        max_position_embeddings=read_max_length(fields, rope, positions),
        norm_eps=number(fields, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=flag(fields, "tie_word_embeddings", False),
        attention_bias=bias,
        attention_output_bias=flag(fields, "attention_output_bias", bias),
        mlp_bias=flag(fields, "mlp_bias", False),
        activation=read_activation(fields),
        windows=read_windows(fields, num_layers, used_by_default=mistral),
        dtype=read_dtype(fields),
        bos_token_id=next(iter(read_token_ids(fields, "bos_token_id")), None),
        eos_token_ids=read_token_ids(fields, "eos_token_id"),
    )


def parameters(config: ModelConfig) -> Plan:
    """What the decoder needs, by its names in a Hugging Face checkpoint."""
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = TensorSpec("model.embed_tokens.weight", vocabulary, padded=True)
    found = [Parameter("embed", "linear", (embedding,), "vocabulary")]
    for i in range(config.num_layers):
        found += layer_parameters(config, i)
    found.append(Parameter("norm", "vector", (TensorSpec("model.norm.weight", (config.hidden_size,)),)))
    head = TensorSpec("lm_head.weight", vocabulary, padded=True)
    if config.tie_word_embeddings:
        return Plan(tuple(found), IGNORED, superseded=(head.name,))
    return Plan((*found, Parameter("lm_head", "linear", (head,), "vocabulary")), IGNORED, superseded=())


def layer_parameters(config: ModelConfig, index: int) -> list[Parameter]:
    """The parameters of one layer; q, k and v are stacked, and so are gate and up."""
    hidden, inter = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": query, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
    gate_up = {"mlp.gate_proj": inter, "mlp.up_proj": inter}

    def norm(name: str, tensor: str) -> Parameter:
        return Parameter(
            f"layers.{index}.{name}", "vector", (TensorSpec(f"model.layers.{index}.{tensor}.weight", (hidden,)),)
        )

    def linear(name: str, rows: dict[str, int], columns: int, bias: bool, split: Split = "rows") -> list[Parameter]:
        prefix = f"model.layers.{index}."
        weights = tuple(TensorSpec(f"{prefix}{tensor}.weight", (n, columns)) for tensor, n in rows.items())
        biases = tuple(TensorSpec(f"{prefix}{tensor}.bias", (n,)) for tensor, n in rows.items())
        weight = Parameter(f"layers.{index}.{name}", "linear", weights, split)
        bias_split: Split = "rows" if split == "rows" else "first"
        return [weight, Parameter(f"layers.{index}.{name}_bias", "vector", biases, bias_split)] if bias else [weight]

    return [
        norm("input_norm", "input_layernorm"),
        *linear("qkv", qkv, hidden, config.attention_bias),
        *linear("o", {"self_attn.o_proj": hidden}, query, config.attention_output_bias, "columns"),
        norm("post_norm", "post_attention_layernorm"),
        *linear("gate_up", gate_up, hidden, config.mlp_bias),
        *linear("down", {"mlp.down_proj": hidden}, inter, config.mlp_bias, "columns"),
    ]
