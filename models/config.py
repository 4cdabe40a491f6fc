"""What a model is, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the kind of scaling and its numbers, all resolved; see :mod:`models.rope`."""

    kind: str  #: one of ``rope.KINDS``
    theta: float  #: base of the frequencies
    rotary_dim: int  #: R: how many of a head's dims are rotated, even
    factor: float = 1.0  #: by how much the context is stretched
    original_max_position: int = 0  #: tokens of context before it was stretched
    low_freq_factor: float = 1.0  #: llama3
    high_freq_factor: float = 4.0  #: llama3
    beta_fast: float = 32.0  #: yarn: pairs that turn more often than this over the original context are kept
    beta_slow: float = 1.0  #: yarn: pairs that turn less often than this are slowed by ``factor``
    truncate: bool = True  #: yarn: whether the range between the two ends on whole pairs
    attention_factor: float = 1.0  #: yarn: multiplies cos and sin
    freq_factors: tuple[float, ...] = ()  #: freq_factors: a divisor for each of the R/2 frequencies


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, whatever file it came from. Sizes are counts of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  #: tokens of the longest sequence allowed; see ``rope_config.read_max_length``
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  #: q, k and v
    attention_output_bias: bool
    mlp_bias: bool
    activation: str  #: "silu" | "gelu" | "gelu_tanh"
    windows: tuple[int, ...]  #: one a layer: a token sees itself and the window - 1 before it; 0: all
    dtype: str  #: "float32" | "bfloat16" | "float16", as the file says
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_sinks: int = 0  #: with windows: the first tokens of a sequence, that all see (StreamingLLM)
