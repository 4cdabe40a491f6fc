"""Blocks of quantised types of GGUF: those that a weight kind has are kept to the bit, others come close."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from helpers.kernels import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.kernels.quantization import dequantize, unpacked
from minipage.weights.gguf_blocks import groups_of, kind_of
from minipage.weights.gguf_types import KNOWN_TYPES, tensor_type

EXACT = {"Q8_0": "int8", "Q5_0": "int8", "Q4_1": "int4", "Q4_0": "int4_symmetric"}

#: Of types that lose something on the way, the most that it is, as a share of the root mean square of the weights.
LOSSES = {"Q4_K": 0.0005, "Q5_1": 0.008, "Q5_K": 0.008, "Q6_K": 0.008, "Q3_K": 0.008, "Q2_K": 0.008, "IQ4_NL": 0.008}


def random_blocks(type: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows of blocks of random codes, six-bit scales among them, with float16 scales of either sign up to 0.01."""
    block, size = gguf.GGML_QUANT_SIZES[type]
    halves = {
        "Q8_0": (0,),
        "Q4_0": (0,),
        "Q5_0": (0,),
        "Q6_K": (208,),
        "Q3_K": (108,),
        "Q2_K": (80, 82),
        "IQ4_NL": (0,),
    }
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for place in halves.get(type.name, (0, 2)):
        scales = rng.uniform(-0.01, 0.01, blocks.shape[:2]).astype("<f2")
        blocks[..., place : place + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_kept_types_are_kept_to_the_bit(name: str, rows: int, groups: int, seed: int) -> None:
    """Groups of any block mean what the gguf package dequantises it to, bit for bit, with the block's own scales."""
    type = gguf.GGMLQuantizationType[name]
    stored = random_blocks(type, rows, groups * 32, seed)
    found = groups_of(stored, type)
    assert kind_of(type) == EXACT[name]
    assert_same_bits(dequantize(found, kind_of(type)).reshape(rows, -1), gguf.dequantize(stored, type))
    assert_same_bits(found.scales, stored.reshape(rows, groups, -1)[..., :2].copy().view("<f2")[..., 0])


def test_codes_are_those_of_the_file() -> None:
    """By hand, a block each: the low halves of 16 bytes are inputs 0 to 15, the high halves the others."""
    header, codes = np.array([0.5, -2.0], "<f2").tobytes(), bytes(range(0, 256, 16)) + bytes(range(16))
    q8_0, q4_1, q4_0 = header[:2] + codes, header + codes[:16], header[:2] + codes[16:]
    nibbles = [list(range(16)), [0] * 16]
    for name, block, expected in (
        ("Q8_0", q8_0, np.frombuffer(codes, np.int8)),
        ("Q4_1", q4_1, np.concatenate(nibbles[::-1])),
        ("Q4_0", q4_0, np.concatenate(nibbles)),
    ):
        groups = groups_of(np.frombuffer(block, np.uint8).reshape(1, -1), gguf.GGMLQuantizationType[name])
        np.testing.assert_array_equal(unpacked(groups, EXACT[name]).codes[0, 0], expected)
        assert groups.scales[0, 0] == 0.5
        assert groups.minima is None if name != "Q4_1" else groups.minima[0, 0] == -2.0


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_other_types_lose(name: str) -> None:
    """Types that no weight kind has come close: Q4_K by the rounding of its scales, others by half a step of int8."""
    type = gguf.GGMLQuantizationType[name]
    stored = random_blocks(type, 64, 1024, 1)
    expected = gguf.dequantize(stored, type)
    found = dequantize(groups_of(stored, type), kind_of(type)).reshape(expected.shape)
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < LOSSES[name]


def test_known_types_are_those_of_the_package() -> None:
    """What is written down here is what the gguf package says, and types beyond it are taken from there."""
    for known in (*KNOWN_TYPES, tensor_type(14)):
        type = gguf.GGMLQuantizationType(known.number)
        assert known[1:] == (type.name, *gguf.GGML_QUANT_SIZES[type])
    assert set(EXACT) < {known.name for known in KNOWN_TYPES}
