"""A forward pass of a few tokens in plain NumPy, to see what the linear layers of a model read: what 4-bit weights should be
most exact for. Numbers of the engine itself come from :mod:`models.decoder`.

Letters: T tokens, H hidden size, NH query heads, KVH key/value heads, D head size, R rotary size, K inputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .config import ModelConfig
from .rope import rope_tables

Array = Any


def run(
    config: ModelConfig,
    embedded: Array,
    vector: Callable[[str], Array],
    linear: Callable[[str, Array], Array],
) -> None:
    """Call ``linear`` for every linear layer but the output head, with what it reads for a text of T tokens.

    ``embedded`` [T, H] is the text; ``vector(name)`` is a parameter [N], ``linear(name, x)`` is x [T, K] @ weight.T plus its
    bias [T, N]. All arrays are float32.
    """
    hidden = embedded
    angles = rope_tables(config.rope, len(embedded))

    def normed(name: str) -> Array:
        mean_square = np.mean(hidden * hidden, axis=-1, keepdims=True)
        return hidden / np.sqrt(mean_square + np.float32(config.norm_eps)) * vector(name)

    for index, window in enumerate(config.windows):
        layer = f"layers.{index}."
        qkv = linear(layer + "qkv", normed(layer + "input_norm"))
        hidden = hidden + linear(layer + "o", _attention(config, qkv, angles, window))
        gate, up = np.split(linear(layer + "gate_up", normed(layer + "post_norm")), 2, axis=-1)
        hidden = hidden + linear(layer + "down", _activated(gate, config.activation) * up)


def _attention(config: ModelConfig, qkv: Array, angles: tuple[Array, Array], window: int) -> Array:
    """Causal attention [T, NH * D] of tokens among themselves."""
    heads = qkv.reshape(len(qkv), -1, config.head_dim).swapaxes(0, 1)
    q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads])
    shared = config.num_heads // config.num_kv_heads
    k, v = (np.repeat(each, shared, axis=0) for each in (_rotated(k, angles), v))
    scores = _rotated(q, angles) @ k.swapaxes(1, 2) * np.float32(config.head_dim**-0.5)
    distance = np.arange(len(qkv))[:, None] - np.arange(len(qkv))
    scores[:, (distance < 0) | (distance >= (window or len(qkv)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = weights / weights.sum(axis=-1, keepdims=True) @ v
    return attended.swapaxes(0, 1).reshape(len(qkv), -1)


def _rotated(x: Array, angles: tuple[Array, Array]) -> Array:
    """x [heads, T, D], its first R dims rotated in halves."""
    cos, sin = angles
    half = cos.shape[1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _activated(x: Array, activation: str) -> Array:
    """silu, gelu, or gelu by its tanh formula, elementwise."""
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        return x / 2 * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[np.float32])(x / math.sqrt(2)))
