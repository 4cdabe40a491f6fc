"""Rotary position embedding (RoFormer, Su et al. 2021, section 3.2) and the ways in which it is stretched.

Pair i of R/2 turns by ``position * frequency[i]``; unscaled, frequency[i] = theta^(-2i/R). The kinds differ in these:

* default: as they are;
* linear: all divided by ``factor`` (position interpolation, Chen et al. 2023);
* dynamic: theta grows with the sequence beyond the original context ("NTK-aware"). Here position p has the theta of a
  sequence of p + 1 tokens: what decoding token by token gives, and the same however a prompt is cut into chunks;
* llama3: waves longer than the original context are slowed by ``factor``, short ones kept, those between blended
  (Llama 3.1);
* yarn: the same idea with a ramp over the pairs, and cos and sin scaled (YaRN, Peng et al. 2023, sections 3.2 to 3.4);
* freq_factors: each frequency has a divisor of its own (how GGUF files store llama3).

Everything is computed in float64: at position 100,000, float32 angles are off by more than 0.005.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .config import RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "freq_factors")
CHUNK = 8192  #: positions

Floats = npt.NDArray[np.float64]


def rope_tables(rope: RopeConfig, num_positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin [num_positions, R/2] float32, yarn's attention factor multiplied in."""
    shape = (num_positions, rope.rotary_dim // 2)
    cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for start in range(0, num_positions, CHUNK):  # so that the float64 angles of a long context are never all in memory
        positions = np.arange(start, min(start + CHUNK, num_positions), dtype=np.float64)
        angles = positions[:, None] * frequencies(rope, positions)
        cos[start : start + CHUNK] = np.cos(angles) * rope.attention_factor
        sin[start : start + CHUNK] = np.sin(angles) * rope.attention_factor
    return cos, sin


def frequencies(rope: RopeConfig, positions: Floats) -> Floats:
    """Radians per position of each pair [R/2]; for the dynamic kind they depend on ``positions`` [P]: [P, R/2]."""
    if rope.kind == "dynamic":
        return dynamic_frequencies(rope, positions)
    plain = plain_frequencies(rope.theta, rope.rotary_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return llama3_frequencies(rope, plain)
    if rope.kind == "yarn":
        return yarn_frequencies(rope, plain)
    if rope.kind == "freq_factors":
        return plain / np.asarray(rope.freq_factors, dtype=np.float64)
    return plain


def plain_frequencies(theta: float | Floats, rotary_dim: int) -> Floats:
    """theta^(-2i/R) for each pair i [R/2]; theta may be a column [P, 1], one a position."""
    return np.asarray(theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))


def dynamic_frequencies(rope: RopeConfig, positions: Floats) -> Floats:
    """[P, R/2]: theta of position p is that of a sequence of p + 1 tokens, unchanged within the original context."""
    length = np.maximum(positions + 1, rope.original_max_position)[:, None]
    stretch = 1 + rope.factor * (length / rope.original_max_position - 1)
    return plain_frequencies(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim)


def llama3_frequencies(rope: RopeConfig, plain: Floats) -> Floats:
    """Kept where a pair turns ``high_freq_factor`` times or more over the original context, divided by ``factor`` where
    it turns ``low_freq_factor`` times or less, blended by the number of turns between."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def yarn_frequencies(rope: RopeConfig, plain: Floats) -> Floats:
    """Kept up to the pair that turns ``beta_fast`` times over the original context, divided by ``factor`` from the pair
    that turns ``beta_slow`` times, a linear ramp over the pairs between."""

    def pair_with_turns(turns: float) -> float:
        log_ratio = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return rope.rotary_dim * log_ratio / (2 * math.log(rope.theta))

    first, last = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001  # a step rather than a division by zero
    slowed = np.clip((np.arange(len(plain)) - first) / width, 0.0, 1.0)
    scaled: Floats = plain * (1 - slowed) + plain / rope.factor * slowed
    return scaled
