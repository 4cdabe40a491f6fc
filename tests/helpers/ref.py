"""REF, the oracle: an independent Llama forward in NumPy that recomputes everything for every token.

No cache, no batch, one sequence at a time, straight from the file, and not a line shared with minipage: what the engine
gives, however it batches, chunks, preempts or shares, must be what this gives.

Letters in shapes: T tokens, V vocabulary, H hidden size, D head size, R rotary size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from helpers.ref_files import read_folder, read_gguf

Array = Any  #: a NumPy array
Window = int | Sequence[int] | None

QUERIES_AT_ONCE = 256  #: scores of a long prompt are more than a cache holds


class Reference:
    """A Llama read from a checkpoint folder or a GGUF file, computed in ``dtype`` (float64, or float32)."""

    def __init__(self, path: str | Path, dtype: npt.DTypeLike = np.float64) -> None:
        path = Path(path)
        self.dtype = np.dtype(dtype)
        self.config, self.tensors = read_gguf(path) if path.suffix == ".gguf" else read_folder(path)
        config = self.config
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.tied = bool(config.get("tie_word_embeddings", False))

    def weight(self, name: str) -> Array:
        """A tensor in the computing dtype; a KeyError if the file lacks it."""
        return self.tensors[name].astype(self.dtype, copy=False)

    def linear(self, x: Array, name: str) -> Array:
        """x @ weight.T, plus the bias where the file has one."""
        y = x @ self.weight(name + ".weight").T
        return y + self.weight(name + ".bias") if name + ".bias" in self.tensors else y

    def norm(self, x: Array, name: str) -> Array:
        """Root mean square norm."""
        variance = np.mean(x * x, axis=-1, keepdims=True)
        return (
            x / np.sqrt(variance + np.asarray(self.config["rms_norm_eps"], self.dtype)) * self.weight(name + ".weight")
        )

    def logits(self, token_ids: Sequence[int], window: Window = None, sinks: int = 0) -> Array:
        """Logits [T, V] after each of ``token_ids``. A ``window`` W, one for all layers or one a layer, lets a token see itself
        and the W-1 before it; 0 and None are no window.

        With ``sinks`` it sees the first tokens too, and positions are those in the cache (StreamingLLM).
        """
        x = self.weight("model.embed_tokens.weight")[np.asarray(token_ids)]
        cos, sin = (table.astype(self.dtype) for table in rope_tables(self.config, self.head_dim, len(token_ids)))
        for i in range(self.config["num_hidden_layers"]):
            layer, seen = f"model.layers.{i}.", window[i] if isinstance(window, Sequence) else window
            normed, name = self.norm(x, layer + "input_layernorm"), layer + "self_attn."
            if sinks and seen:
                x = x + self.streaming_attention(normed, name, cos, sin, seen, sinks)
            else:
                x = x + self.attention(normed, name, cos, sin, seen)
            x = x + self.mlp(self.norm(x, layer + "post_attention_layernorm"), layer + "mlp.")
        x = self.norm(x, "model.norm")
        return x @ self.weight("model.embed_tokens.weight" if self.tied else "lm_head.weight").T

    def heads(self, x: Array, name: str) -> tuple[Array, Array, Array]:
        """q [T, NH, D], k and v [T, KVH, D] of x [T, H], before any rotation."""
        counts = {"q_proj": self.num_heads, "k_proj": self.num_kv_heads, "v_proj": self.num_kv_heads}
        q, k, v = (self.linear(x, name + part).reshape(len(x), count, -1) for part, count in counts.items())
        return q, k, v

    def attention(self, x: Array, name: str, cos: Array, sin: Array, window: int | None) -> Array:
        """Causal attention of x [T, H] over itself."""
        tokens, (q, k, v) = len(x), self.heads(x, name)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = np.empty_like(q)
        for head, start in itertools.product(range(self.num_heads), range(0, tokens, QUERIES_AT_ONCE)):
            stop = min(start + QUERIES_AT_ONCE, tokens)
            shared = head * self.num_kv_heads // self.num_heads
            scores = q[start:stop, head] @ k[:stop, shared].T * np.asarray(self.head_dim**-0.5, self.dtype)
            age = np.arange(start, stop)[:, None] - np.arange(stop)  # of each key, seen from each query
            scores[(age < 0) | (age >= (window or tokens))] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[start:stop, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:stop, shared]
        return self.linear(out.reshape(tokens, -1), name + "o_proj")

    def streaming_attention(self, x: Array, name: str, cos: Array, sin: Array, window: int, sinks: int) -> Array:
        """A rolling cache token by token: what it holds is rotated anew for each query, by the places in the cache."""
        tokens, (q, k, v) = len(x), self.heads(x, name)
        out = np.empty_like(q)
        cache: list[int] = []
        for token in range(tokens):
            cache.append(token)
            if len(cache) > sinks + window:
                del cache[sinks]
            size = len(cache)
            keys, query = rotate(k[cache], cos[:size], sin[:size]), rotate(q[[token]], cos[[size - 1]], sin[[size - 1]])
            for head in range(self.num_heads):
                shared = head * self.num_kv_heads // self.num_heads
                scores = keys[:, shared] @ query[0, head] * np.asarray(self.head_dim**-0.5, self.dtype)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ v[cache, shared]
        return self.linear(out.reshape(tokens, -1), name + "o_proj")

    def mlp(self, x: Array, name: str) -> Array:
        """down(silu(gate) * up)."""
        gate = self.linear(x, name + "gate_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, name + "up_proj"), name + "down_proj")


# ---- what tests ask --------------------------------------------------------------------------------------------------


def greedy(
    model: Reference, prompt: Sequence[int], num_tokens: int, window: Window = None, stop: Sequence[int] = ()
) -> list[int]:
    """The ``num_tokens`` most likely tokens after ``prompt``, one by one; ends early behind a token of ``stop``."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(np.argmax(model.logits(token_ids, window)[-1])))
        if token_ids[-1] in stop:
            break
    return token_ids[len(prompt) :]


def log_softmax(logits: Array) -> Array:
    """Log probabilities over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def smallest_gap(model: Reference, prompt: Sequence[int], num_tokens: int, window: Window = None) -> float:
    """How close the two best logits come over ``num_tokens`` greedy steps; below rounding, the winner is luck."""
    token_ids = [*prompt, *greedy(model, prompt, num_tokens, window)]
    best = np.sort(model.logits(token_ids[:-1], window)[len(prompt) - 1 :], axis=-1)
    return float((best[:, -1] - best[:, -2]).min())


def safe_prompts(
    model: Reference,
    lengths: Sequence[int],
    num_tokens: int,
    *,
    seed: int = 0,
    gap: float = 0.002,
    window: Window = None,
) -> list[list[int]]:
    """A random prompt of each length whose ``num_tokens`` greedy steps are never a close call."""
    rng = np.random.default_rng(seed)
    vocab = model.config["vocab_size"]

    def candidates(length: int) -> Iterator[list[int]]:
        while True:
            yield [int(i) for i in rng.integers(0, vocab, length)]

    return [
        next(prompt for prompt in candidates(length) if smallest_gap(model, prompt, num_tokens, window) >= gap)
        for length in lengths
    ]


# ---- rotary position embedding ---------------------------------------------------------------------------------------


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate dim i of x [T, heads, D] with dim i + R/2; cos and sin [T, R/2]."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def rope_tables(config: Mapping[str, Any], head_dim: int, num_positions: int) -> tuple[Array, Array]:
    """cos and sin [T, R/2] in float64, each position in turn, with what the config's scaling rule makes of it."""
    rule = {"rope_theta": config.get("rope_theta", 10000.0), "partial_rotary_factor": 1.0}
    rule |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rule.get("rope_type") or rule.get("type") or "default"
    rotary = int(head_dim * rule["partial_rotary_factor"])
    cos, sin = np.empty((num_positions, rotary // 2)), np.empty((num_positions, rotary // 2))
    for position in range(num_positions):
        frequencies, factor = scaled_frequencies(kind, rule, config, rotary, position)
        cos[position] = np.cos(position * frequencies) * factor
        sin[position] = np.sin(position * frequencies) * factor
    return cos, sin


def scaled_frequencies(
    kind: str, rule: Mapping[str, Any], config: Mapping[str, Any], rotary: int, position: int
) -> tuple[Array, float]:
    """The angle per position of each pair [R/2], and the factor on cos and sin."""
    base = float(rule["rope_theta"])
    exponents = np.arange(0, rotary, 2) / rotary
    plain = base**-exponents
    if kind == "default":
        divisors = rule.get("divisors")
        return (plain / np.asarray(divisors, np.float64) if divisors is not None else plain), 1.0
    limit = config["max_position_embeddings"]
    original = rule.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or limit
    factor = float(rule["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "dynamic":  # the base grows with the sequence, here the tokens up to this one
        length = max(position + 1, limit)
        grown = base * (factor * length / limit - (factor - 1)) ** (rotary / (rotary - 2))
        return grown**-exponents, 1.0
    if kind == "llama3":
        return np.array([llama3_frequency(f, factor, rule, original) for f in plain]), 1.0
    if kind == "yarn":
        return yarn_frequencies(plain, factor, rule, original, base, rotary)
    raise ValueError(f"REF knows no rope type {kind!r}")


def llama3_frequency(frequency: float, factor: float, rule: Mapping[str, Any], original: int) -> float:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between are blended."""
    turns = original * frequency / (2 * math.pi)  # over the original context
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    kept: float = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (kept + (1 - kept) / factor)


def yarn_frequencies(
    plain: Array, factor: float, rule: Mapping[str, Any], original: int, base: float, rotary: int
) -> tuple[Array, float]:
    """YaRN (Peng et al. 2023, section 3): a ramp over the pairs from kept to slowed, and a sharper softmax."""

    def pair_with_turns(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with_turns(rule.get("beta_fast") or 32), pair_with_turns(rule.get("beta_slow") or 1)
    if rule.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    slowed = np.clip((np.arange(rotary // 2) - low) / ((high - low) or 0.001), 0, 1)
    return plain * (1 - slowed) + plain / factor * slowed, yarn_attention_factor(factor, rule)


def yarn_attention_factor(factor: float, rule: Mapping[str, Any]) -> float:
    """The factor on cos and sin: given, or 0.1 ln(factor) + 1, or DeepSeek's quotient of two of these."""

    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rule.get("attention_factor")
    if given is not None:
        return float(given)
    if rule.get("mscale") and rule.get("mscale_all_dim"):
        return sharpness(rule["mscale"]) / sharpness(rule["mscale_all_dim"])
    return sharpness(1.0)
