"""Rotary positions: every kind of scaling against its formula in float64, and against values of transformers 5.24."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minipage.models import RopeConfig, read_config
from minipage.models.fields import LARGEST, SMALLEST
from minipage.models.rope import CHUNK, KINDS, frequencies, rope_tables

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
POSITIONS = (0, 1, 255, 4095, 100_000)


def read_rope(scaling: dict[str, Any] | None, **fields: Any) -> RopeConfig:
    """The rope of the test's config with this scaling."""
    return read_config({**CONFIG, "rope_scaling": scaling, **fields}).rope


def expected_frequency(rope: RopeConfig, pair: int, position: int) -> float:
    """The formula of each kind for one pair at one position, in Python floats."""
    size, theta = rope.rotary_dim, rope.theta
    if rope.kind == "dynamic":
        length = max(position + 1, rope.original_max_position)
        grown = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        theta *= grown ** (size / (size - 2))
    plain = 1 / theta ** (2 * pair / size)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "freq_factors":
        return plain / rope.freq_factors[pair]
    if rope.kind == "llama3":
        wavelength, original = 2 * math.pi / plain, rope.original_max_position
        if wavelength < original / rope.high_freq_factor:
            return plain
        if wavelength > original / rope.low_freq_factor:
            return plain / rope.factor
        smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return (1 - smooth) * plain / rope.factor + smooth * plain
    if rope.kind == "yarn":
        low, high = (
            size * math.log(rope.original_max_position / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = min(max((pair - low) / (high - low), 0), 1)
        return (1 - ramp) * plain + ramp * plain / rope.factor
    return plain


SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "freq_factors": {"rope_type": "freq_factors", "freq_factors": [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_follow_the_formula_at_long_positions(name: str) -> None:
    """cos and sin are within 1e-6 of the kind's formula in float64, at positions up to 100,000."""
    rope = read_rope(SCALINGS[name])
    cos, sin = rope_tables(rope, max(POSITIONS) + 1)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (max(POSITIONS) + 1, rope.rotary_dim // 2)
    for position in POSITIONS:
        angles = [position * expected_frequency(rope, pair, position) for pair in range(rope.rotary_dim // 2)]
        np.testing.assert_allclose(cos[position], rope.attention_factor * np.cos(angles), atol=1e-6)
        np.testing.assert_allclose(sin[position], rope.attention_factor * np.sin(angles), atol=1e-6)


def test_every_kind_is_tested() -> None:
    """The table of scalings above leaves no kind out."""
    assert {name.split(",")[0] for name in SCALINGS} == set(KINDS)


def test_llama3_frequencies_of_a_small_model() -> None:
    """factor 8 over 64 positions gives the eight frequencies known for it; without scaling they are the plain ones."""
    known = [1, 0.244385, 0.013042, 0.003953, 0.00125, 0.000395, 0.000125, 0.00004]
    np.testing.assert_allclose(frequencies(read_rope({"rope_type": "llama3", **LLAMA3}), np.zeros(1)), known, atol=6e-7)
    np.testing.assert_allclose(frequencies(read_rope(None), np.zeros(1))[:4], [1, 0.316228, 0.1, 0.031623], atol=6e-7)


def test_yarn_equals_transformers() -> None:
    """YaRN's frequencies and attention factors are those that transformers computes."""
    rope = read_rope({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    known = [1.0, 0.237170815, 0.05, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05]
    np.testing.assert_allclose(frequencies(rope, np.zeros(1)), known, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(1.138629436111989)

    deepseek = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    rope = read_rope({**deepseek, "mscale": 0.707, "mscale_all_dim": 1.0}, head_dim=64)
    known = [0.1, 0.012447956018149853, 0.0007905694073997438, 1.4058532542549074e-05]
    np.testing.assert_allclose(frequencies(rope, np.zeros(1))[8::6], known, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(0.9210423553163399)

    rope = read_rope({**deepseek, "truncate": False, "beta_fast": 16, "beta_slow": 2}, head_dim=64)
    known = [0.1, 0.015096119605004787, 0.00012395245721563697, 1.4058532542549074e-05]
    np.testing.assert_allclose(frequencies(rope, np.zeros(1))[8::6], known, rtol=1e-6)
    assert read_rope({**deepseek, "attention_factor": 1.5}).attention_factor == 1.5


def test_dynamic_is_that_of_decoding_token_by_token() -> None:
    """Position p has transformers' frequencies for a sequence of p + 1 tokens, and plain ones within the original length."""
    rope = read_rope({"type": "dynamic", "factor": 2.0})
    known = {
        511: [1.0, 0.316227764, 0.1, 0.0316227786, 0.01, 0.00316227786, 0.001, 0.000316227786],
        600: [
            1.0,
            0.30303216,
            0.0918284804,
            0.0278269816,
            0.00843246933,
            0.00255530933,
            0.000774340879,
            0.000234650171,
        ],
        4095: [
            1.0,
            0.214776605,
            0.0461289883,
            0.00990742724,
            0.00212788349,
            0.000457019574,
            9.81571211e-05,
            2.10818507e-05,
        ],
    }
    for position, expected in known.items():
        np.testing.assert_allclose(frequencies(rope, np.array([float(position)]))[0], expected, rtol=1e-6)


def test_tables_do_not_depend_on_their_length() -> None:
    """A longer table begins with the shorter one, bit for bit, for every kind and across chunks."""
    for scaling in SCALINGS.values():
        rope = read_rope(scaling)
        short, long = rope_tables(rope, 700)[0], rope_tables(rope, CHUNK + 3)[0]
        np.testing.assert_array_equal(short, long[:700])
        assert np.isfinite(long).all()


@pytest.mark.parametrize("number", [SMALLEST, 1e-9, 3.0, 1e9, LARGEST])
@pytest.mark.parametrize(
    "key", ["rope_theta", "factor", "beta_fast", "beta_slow", "attention_factor", "high_freq_factor"]
)
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_tables_are_finite_whatever_is_allowed(kind: str, key: str, number: float) -> None:
    """A number that a config may have makes no table with infinities or NaN, or is refused where it cannot go with others."""
    usual = {"factor": 4.0, "low_freq_factor": 1e-30, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    try:
        rope = read_rope({"rope_type": kind, **usual, key: number})
    except ValueError as error:
        assert key in str(error) and number in (SMALLEST, 1e-9)
        return
    with np.errstate(all="raise", under="ignore"):
        cos, sin = rope_tables(rope, 600)
    assert np.isfinite(cos).all() and np.isfinite(sin).all()
