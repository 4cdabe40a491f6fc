"""How a config describes rotary positions: its spellings, the numbers each kind needs, and the longest sequence.

Read alike: ``rope_scaling`` with ``type`` or ``rope_type`` beside a top-level ``rope_theta`` (transformers 4), and
``rope_parameters`` with everything inside (transformers 5). A kind that is not known is an error, never ignored.
"""

from __future__ import annotations

import math
from typing import Any

from .config import RopeConfig
from .fields import Fields, flag, integer, number, refuse
from .rope import KINDS

DEFAULT_THETA = 10000.0


def read_rope(fields: Fields, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """The rope of a config whose heads have ``head_dim`` dims and whose ``max_position_embeddings`` is as given."""
    rule = read_rule(fields)
    kind = rule.get("rope_type") or rule.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        raise refuse("rope_type", kind, ", ".join(KINDS))
    rotary_dim = read_rotary_dim(rule, head_dim)
    common: dict[str, Any] = {
        "kind": kind,
        "theta": number(rule, "rope_theta", DEFAULT_THETA),
        "rotary_dim": rotary_dim,
    }
    if kind == "default":
        return RopeConfig(**common)
    if kind == "freq_factors":
        return RopeConfig(**common, freq_factors=read_freq_factors(rule, rotary_dim))
    original = integer(rule, "original_max_position_embeddings", max_position_embeddings)
    if kind == "yarn":
        return read_yarn(rule, common, original, max_position_embeddings)
    if kind == "dynamic" and rotary_dim < 4:
        raise refuse("rotary dims", rotary_dim, "at least 4 with rope_type dynamic")
    common["factor"] = number(rule, "factor")
    if kind == "linear":
        return RopeConfig(**common)
    if kind == "dynamic":
        return RopeConfig(**common, original_max_position=max_position_embeddings)
    low, high = number(rule, "low_freq_factor"), number(rule, "high_freq_factor")
    if low >= high:
        raise refuse("low_freq_factor", low, f"less than high_freq_factor, which is {high}")
    return RopeConfig(**common, original_max_position=original, low_freq_factor=low, high_freq_factor=high)


def read_max_length(fields: Fields, rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest sequence that the model allows, in tokens: ``max_position_embeddings``, except where that is the
    length before scaling by the kind's own rule:

    * dynamic: always so (the kind changes nothing below it), hence ``max_position_embeddings * factor``;
    * yarn: where the rule's ``original_max_position_embeddings`` is given and equal, hence that times ``factor``.

    A ``factor`` is never applied to a length that has it in already.
    """
    unscaled = (
        rope.kind == "yarn" and read_rule(fields).get("original_max_position_embeddings") == max_position_embeddings
    )
    if rope.kind == "dynamic" or unscaled:
        return max(max_position_embeddings, int(max_position_embeddings * rope.factor))
    return max_position_embeddings


def read_rule(fields: Fields) -> dict[str, Any]:
    """The rope's keys in one dict, wherever the config has them."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    inside = fields.get(key) or {}
    if not isinstance(inside, dict) or any(isinstance(value, dict) for value in inside.values()):
        raise refuse(key, inside, "null, or an object of numbers and strings (one rope for all layers)")
    outside = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rule = {**outside, **inside}
    if fields.get("original_max_position_embeddings") is not None:
        rule["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return rule


def read_rotary_dim(rule: dict[str, Any], head_dim: int) -> int:
    """R: the part of ``head_dim`` that ``partial_rotary_factor`` says, rounded down; an even number."""
    share = number(rule, "partial_rotary_factor", 1.0)
    rotary_dim = math.floor(head_dim * share + 1e-6)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise refuse(
            "partial_rotary_factor", share, f"what gives an even number of dims, 2 to head_dim, which is {head_dim}"
        )
    return rotary_dim


def read_freq_factors(rule: dict[str, Any], rotary_dim: int) -> tuple[float, ...]:
    """The divisors of the R/2 frequencies, as GGUF's ``rope_freqs.weight`` has them."""
    divisors = rule.get("freq_factors")
    if not isinstance(divisors, list) or len(divisors) != rotary_dim // 2:
        raise refuse("freq_factors", divisors, f"a list of {rotary_dim // 2} numbers")
    return tuple(number({"freq_factors": divisor}, "freq_factors") for divisor in divisors)


def read_yarn(rule: dict[str, Any], common: dict[str, Any], original: int, max_position_embeddings: int) -> RopeConfig:
    """YaRN's numbers; a ``factor`` left out is how much longer the context became."""
    factor = number(rule, "factor", max_position_embeddings / original)
    if common["theta"] <= 1:
        raise refuse("rope_theta", common["theta"], "above 1 with rope_type yarn")
    return RopeConfig(
        **common,
        factor=factor,
        original_max_position=original,
        beta_fast=number(rule, "beta_fast", 32.0),
        beta_slow=number(rule, "beta_slow", 1.0),
        truncate=flag(rule, "truncate", True),
        attention_factor=yarn_attention_factor(rule, factor),
    )


def yarn_attention_factor(rule: dict[str, Any], factor: float) -> float:
    """What multiplies cos and sin: as given; or 0.1 ln(factor) + 1 (YaRN, Peng et al. 2023, section 3.4); or, where the
    config has ``mscale`` and ``mscale_all_dim``, DeepSeek's quotient of two of these."""
    if rule.get("attention_factor") is not None:
        return number(rule, "attention_factor")

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rule.get("mscale") and rule.get("mscale_all_dim"):
        return scale(number(rule, "mscale")) / scale(number(rule, "mscale_all_dim"))
    return scale(1.0)
