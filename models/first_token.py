"""What the first token of a text does to every linear layer.

Models leave on their first tokens, whatever these are, a few activations that are thousands of times larger than all others,
and most attention goes there (attention sinks: Xiao et al. 2023, section 3.1; massive activations: Sun et al. 2024, sections 2
and 4). Weights that meet them have to be more exact than the rest. One token alone is enough to find them, and its attention
is no work: it sees only itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .config import ModelConfig

Array = Any


def first_token_inputs(
    config: ModelConfig,
    embedding: Array,
    vector: Callable[[str], Array],
    linear: Callable[[str, Array], Array],
) -> dict[str, Array]:
    """The input [K] of each linear layer of a text's first token, by the parameter's name; all arrays are float32.

    ``embedding`` [H] is the token's; ``vector(name)`` is a parameter [N], ``linear(name, x)`` a weight (N, K) times x [K], plus
    its bias.
    """
    inputs: dict[str, Array] = {}
    hidden = embedding

    def apply(name: str, x: Array) -> Array:
        inputs[name] = x
        return linear(name, x)

    def normed(name: str) -> Array:
        return hidden / np.sqrt(np.mean(hidden * hidden) + np.float32(config.norm_eps)) * vector(name)

    for index in range(config.num_layers):
        layer = f"layers.{index}."
        qkv = apply(layer + "qkv", normed(layer + "input_norm"))
        values = qkv[-config.num_kv_heads * config.head_dim :].reshape(config.num_kv_heads, config.head_dim)
        attended = np.repeat(values, config.num_heads // config.num_kv_heads, axis=0)
        hidden = hidden + apply(layer + "o", attended.reshape(-1))
        gate, up = np.split(apply(layer + "gate_up", normed(layer + "post_norm")), 2)
        hidden = hidden + apply(layer + "down", _activated(gate, config.activation) * up)
    return inputs


def _activated(x: Array, activation: str) -> Array:
    """silu, gelu, or gelu by its tanh formula, elementwise."""
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        return x / 2 * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return x / 2 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x], np.float32))
