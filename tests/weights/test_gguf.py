"""GGUF files: every tensor type, row order, names, the translated config, and refusal of what is hostile or unknown."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from helpers.kernels import assert_same_bits
from helpers.memory import holds, measure_peak
from helpers.models import HISTORY_CONFIG, bfloat16_bits, history_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.errors import ModelLoadError
from minipage.kernels.quantization import dequantize, ungroup, unpacked
from minipage.models import parameters
from minipage.weights.checkpoint import Checkpoint, open_checkpoint
from minipage.weights.gguf import half_rotated_order, readable_types
from minipage.weights.gguf_blocks import groups_of, kind_of
from minipage.weights.gguf_header import read_header
from minipage.weights.gguf_types import KNOWN_TYPES, tensor_type
from minipage.weights.loader import check

CONFIG = {**HISTORY_CONFIG, "head_dim": 16, "intermediate_size": 64}
TENSORS = history_tensors(3, CONFIG)
SCALING = "llama.rope.scaling."


def opened(path: Path, **options: Any) -> Checkpoint:
    """The history model as a GGUF file, written with these options and opened."""
    return open_checkpoint(str(write_gguf(path / "model.gguf", CONFIG, TENSORS, **options)))


@pytest.mark.parametrize("matrix_type", ["F32", "F16", "BF16"])
def test_float_tensors_come_back_bit_for_bit(matrix_type: str, tmp_path: Path) -> None:
    """Names, shapes, row order and bits of every tensor are those of the Hugging Face model, q and k included."""
    source = opened(tmp_path, matrix_type=matrix_type).source
    assert sorted(source.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        stored = tensor
        if tensor.ndim > 1:
            stored = {"F32": tensor, "F16": tensor.astype(np.float16), "BF16": bfloat16_bits(tensor)}[matrix_type]
        assert source.shape(name) == tensor.shape
        for start, stop in ((0, None), (0, 1), (3, 21), (17, 18), (5, 5)):
            rows = source.read(name, start, stop)
            assert rows.dtype == stored.dtype
            np.testing.assert_array_equal(rows, stored[start:stop], err_msg=name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes make infinite scales
@pytest.mark.parametrize("matrix_type", readable_types())
def test_quantised_rows_are_dequantised_alone(matrix_type: str, tmp_path: Path) -> None:
    """Every type that the gguf package dequantises is read, and a range of rows equals those rows of the whole."""
    type = gguf.GGMLQuantizationType[matrix_type]
    block, size = gguf.GGML_QUANT_SIZES[type]
    columns = max(block, 64)
    stored = np.random.default_rng(0).integers(0, 256, (32, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {
        "embedding_length": 64,
        "feed_forward_length": 8,
        "block_count": 1,
        "context_length": 16,
    }.items():
        writer.add_uint32("llama." + key, value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, stored, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = open_checkpoint(str(tmp_path / "model.gguf")).source
    assert source.dtype("model.layers.0.mlp.up_proj.weight") == matrix_type
    whole = np.asarray(gguf.dequantize(stored, type), np.float32)
    order = np.arange(32).reshape(1, 16, 2).swapaxes(1, 2).reshape(-1)  # one head of 32, undone by hand
    for name, expected in (("mlp.up_proj", whole), ("self_attn.q_proj", whole[order])):
        for start, stop in ((0, 32), (3, 9)):
            rows = source.read(f"model.layers.0.{name}.weight", start, stop)
            if rows.dtype == np.uint16:
                rows = (rows.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(rows.astype(np.float32), expected[start:stop])


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


@pytest.mark.parametrize("matrix_type", ["Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_groups_are_read_by_rows(matrix_type: str, tmp_path: Path) -> None:
    """A range of rows is quantised as those rows of the whole, q and k in the order of their rows as floats."""
    source = opened(tmp_path, matrix_type=matrix_type).source
    for name, tensor in TENSORS.items():
        if tensor.ndim < 2:
            assert source.kind(name) == "float32"
            continue
        kind = source.kind(name)
        assert kind is not None
        for start, stop in ((0, None), (0, 1), (3, 21), (17, 18)):
            values = ungroup(dequantize(source.read_groups(name, start, stop), kind), tensor.shape[1])
            if matrix_type == "Q5_1":
                np.testing.assert_allclose(values, source.read(name, start, stop), atol=0.01)
            else:
                assert_same_bits(values, source.read(name, start, stop))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the infinite scale
def test_values_that_cannot_be_quantised_again_are_refused(tmp_path: Path) -> None:
    """A type that is quantised again, with an infinite scale in the file: the error names file and tensor."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type="Q5_1")
    place = read_header(path).tensors["blk.1.ffn_up.weight"].offset
    content = bytearray(path.read_bytes())
    content[place : place + 2] = np.array([np.inf], "<f2").tobytes()
    path.write_bytes(content)
    source = open_checkpoint(str(path)).source
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: tensor {name}: a weight that is NaN or infinite"):
        source.read_groups(name)


def test_row_order_with_a_partly_rotated_head() -> None:
    """Neighbours among the first R rows become halves; the rest of a head stays where it is."""
    np.testing.assert_array_equal(half_rotated_order(8, 8), [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(half_rotated_order(8, 4), [0, 2, 1, 3, 4, 5, 6, 7])


def test_the_package_reads_the_same_metadata(tmp_path: Path) -> None:
    """Our reading of the header agrees with the gguf package's on every key and every tensor's place."""
    values = {
        "a.bool": True,
        "a.text": "né",
        "a.list": ["x", "", "ü"],
        "a.ints": [1, -2],
        "a.floats": [0.5, 2.0],
        "a.neg": -1.5,
    }
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, metadata=values, matrix_type="F16")
    header, reader = read_header(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    places = {t.name: (t.tensor_type, tuple(int(d) for d in t.shape)[::-1], t.data_offset) for t in reader.tensors}
    assert {name: (info.type.number, *info[1:]) for name, info in header.tensors.items()} == places


def test_known_types_are_those_of_the_package() -> None:
    """What is written down here is what the gguf package says, and types beyond it are taken from there."""
    for known in (*KNOWN_TYPES, tensor_type(14)):
        type = gguf.GGMLQuantizationType(known.number)
        assert known[1:] == (type.name, *gguf.GGML_QUANT_SIZES[type])
    assert set(EXACT) < {known.name for known in KNOWN_TYPES}


@pytest.mark.parametrize(("matrix_type", "needed"), [("Q4_0", False), ("Q8_0", False), ("F16", False), ("Q5_1", True)])
def test_the_package_is_imported_for_rare_types_only(matrix_type: str, needed: bool, tmp_path: Path) -> None:
    """Its import takes a tenth of a second, which the start of a program feels."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type=matrix_type)
    code = (
        "import sys; from minipage.weights.checkpoint import open_checkpoint;"
        f"source = open_checkpoint({str(path)!r}).source; name = 'model.layers.0.mlp.up_proj.weight';"
        "source.readable; (source.read_groups if source.kind(name).startswith('int') else source.read)(name);"
        "print('gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{needed}\n"


# ---- config --------------------------------------------------------------------------------------------------------


def test_config_is_that_of_the_folder(tmp_path: Path) -> None:
    """The translated config describes the model that was written, and its plan fits the file."""
    checkpoint = opened(tmp_path)
    config = checkpoint.model_config()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (61, 32, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.max_position_embeddings, config.activation, config.dtype) == (4096, "silu", "float32")
    assert config.norm_eps == pytest.approx(1e-5)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 16)
    assert not config.tie_word_embeddings
    check(parameters(config), checkpoint.source)


def test_tied_head_dtype_and_layers_given_as_lists(tmp_path: Path) -> None:
    """No output.weight means a tied head; dtype is that of the matrices; per-layer numbers may be lists of equal ones."""
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "lm_head.weight"}
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [64, 64]}
    path = write_gguf(tmp_path / "model.gguf", CONFIG, tensors, metadata=metadata, matrix_type="BF16")
    config = open_checkpoint(str(path)).model_config()
    assert config.tie_word_embeddings
    assert (config.dtype, config.num_kv_heads) == ("bfloat16", 2)


@pytest.mark.parametrize(
    ("matrix_type", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "float16")]
)
def test_dtype_of_keys_and_values(matrix_type: str, dtype: str, tmp_path: Path) -> None:
    """That of the matrices, and float16 where these are quantised."""
    assert opened(tmp_path, matrix_type=matrix_type).model_config().dtype == dtype


def test_vocabulary_size_is_that_of_the_tokens(tmp_path: Path) -> None:
    """With a vocabulary, its length counts; the embedding may have more rows, and they are not used."""
    tokens = [f"t{i}" for i in range(57)]
    checkpoint = opened(tmp_path, metadata={"tokenizer.ggml.tokens": tokens})
    assert checkpoint.model_config().vocab_size == 57
    assert checkpoint.vocabulary == {"tokenizer.ggml.tokens": tokens}
    check(parameters(checkpoint.model_config()), checkpoint.source)


def test_biases_are_found_and_reordered(tmp_path: Path) -> None:
    """Biases in the file set the config's flags, and those of q and k come back in half-rotated order."""
    rng = np.random.default_rng(0)
    biases = {
        name.replace(".weight", ".bias"): rng.normal(size=len(tensor)).astype(np.float32)
        for name, tensor in TENSORS.items()
        if ".self_attn." in name and "o_proj" not in name
    }
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", CONFIG, {**TENSORS, **biases})))
    config = checkpoint.model_config()
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, False, False)
    check(parameters(config), checkpoint.source)
    for name, bias in biases.items():
        np.testing.assert_array_equal(checkpoint.source.read(name), bias)


def test_rope_scalings(tmp_path: Path) -> None:
    """Linear and yarn keys, the first files' scale_linear, and the divisors of rope_freqs.weight all arrive."""

    def rope(metadata: dict[str, Any], **options: Any) -> Any:
        return opened(tmp_path, metadata=metadata, **options).model_config().rope

    assert rope({SCALING + "type": "none"}).kind == "default"
    linear = rope({SCALING + "type": "linear", SCALING + "factor": 2.0})
    assert (linear.kind, linear.factor) == ("linear", 2.0)
    assert rope({"llama.rope.scale_linear": 4.0}).factor == 4.0
    untyped = rope(
        {SCALING + "factor": 8.0, "llama.rope.scale_linear": 4.0}
    )  # a factor that is not said to be of any kind
    assert (untyped.kind, untyped.factor) == ("linear", 8.0)
    assert rope({SCALING + "type": "none", SCALING + "factor": 8.0}).kind == "default"
    yarn_keys = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 1024,
        "yarn_beta_fast": 16.0,
        "finetuned": True,
    }
    yarn = rope({SCALING + key: value for key, value in yarn_keys.items()})
    assert (yarn.kind, yarn.factor, yarn.original_max_position, yarn.beta_fast, yarn.beta_slow) == (
        "yarn",
        4.0,
        1024,
        16,
        1,
    )
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    yarn_keys = {"type": "yarn", "factor": 4.0, "attn_factor": 0.5}
    assert rope({SCALING + k: v for k, v in yarn_keys.items()}).attention_factor == pytest.approx(
        0.05 * math.log(4) + 0.5
    )
    divisors = [1.0, 1.0, 1.0, 2.0, 3.0, 8.0, 8.0, 8.0]
    assert rope({}, freq_factors=divisors).freq_factors == tuple(divisors)
    assert "rope_freqs.weight" not in opened(tmp_path, freq_factors=divisors).source.names()
    assert rope({"llama.rope.dimension_count": 8}).rotary_dim == 8


def test_what_ends_a_generation(tmp_path: Path) -> None:
    """eos, eot and eom ids, and control or user-defined tokens with a known text; never a plain token of that text."""
    tokens = ["<|endoftext|>", "a", "<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "b", "c"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 3, 4, 3, 1, 1, 3],
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.eot_token_id": 7,
    }
    checkpoint = opened(tmp_path, metadata=metadata)
    assert checkpoint.generation_config == {"eos_token_id": [0, 2, 3, 4, 7]}
    assert checkpoint.model_config().eos_token_ids == (4,)


def test_window_counts_where_the_file_has_one(tmp_path: Path) -> None:
    """attention.sliding_window is a window in every layer."""
    assert opened(tmp_path, metadata={"llama.attention.sliding_window": 8}).model_config().windows == (8, 8)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8; allowed: absent, or 0"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ({"llama.attention.value_length": 8}, "value_length is 8; allowed: as key_length: 16"),
        (
            {"llama.attention.head_count_kv": [1, 2]},
            r"head_count_kv is \[1, 2\]; allowed: the same number in all layers",
        ),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.embedding_length": "32"}, "embedding_length is '32'"),
        ({"llama.context_length": 0}, "context_length is 0"),
        (
            {"llama.attention.key_length": 2**30, "llama.attention.value_length": 2**30},
            r"has shape \[64, 32\], wanted \[4294967296, 32\]",
        ),
        ({"tokenizer.ggml.tokens": 7}, r"tokenizer\.ggml\.tokens is 7; allowed: a list"),
        ({"tokenizer.ggml.token_type": True}, r"tokenizer\.ggml\.token_type is True; allowed: a list"),
        ({"tokenizer.ggml.tokens": "abc"}, r"tokenizer\.ggml\.tokens is 'abc'; allowed: a list"),
        ({SCALING + "factor": 0.0}, r"factor is 0\.0"),
        ({SCALING + "type": "longrope"}, r"scaling\.type is 'longrope'; allowed: none, linear, yarn"),
        ({SCALING + "type": "linear"}, r"scaling\.factor is missing"),
        ({SCALING + "type": "linear", SCALING + "factor": 2.0, SCALING + "attn_factor": 2.0}, "attn_factor is 2"),
        ({SCALING + "alpha": 2.0}, r"scaling\.alpha is 2"),
        ({"llama.rope.dimension_count": 64}, "partial_rotary_factor is 4"),
        ({"split.count": 2}, "split.count is 2"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_what_is_not_supported_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A ModelLoadError names the file, the key, its value and what is allowed."""
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: .*({message})"):
        checkpoint = opened(tmp_path, metadata=metadata)
        check(parameters(checkpoint.model_config()), checkpoint.source)


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    """A file whose metadata is refused does not stay open, nor does one that is closed."""
    with pytest.raises(ModelLoadError, match="expert_count") as caught:
        opened(tmp_path, metadata={"llama.expert_count": 8})
    assert caught.tb is not None
    assert not holds(tmp_path / "model.gguf")
    opened(tmp_path).close()
    assert not holds(tmp_path / "model.gguf")


def test_other_architectures_and_types_are_refused(tmp_path: Path) -> None:
    """An unknown architecture is named with what is allowed; so is a tensor type that cannot be dequantised."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, {}, architecture="falcon")
    with pytest.raises(ModelLoadError, match=r"model\.gguf: general\.architecture is 'falcon'; allowed: llama"):
        open_checkpoint(str(path))
    tensors = {**TENSORS, "model.layers.1.mlp.up_proj.weight": np.zeros((48, 32), np.int8)}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "types.gguf", CONFIG, tensors)))
    message = r"types\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight has dtype I8, allowed: F32, F16, Q4_0"
    with pytest.raises(ModelLoadError, match=message):
        check(parameters(checkpoint.model_config()), checkpoint.source)


# ---- hostile headers -----------------------------------------------------------------------------------------------


def text(value: bytes | str) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    """A metadata pair of a raw value."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    """A tensor's entry."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def header(tensors: list[bytes], pairs: list[bytes], tail: bytes = bytes(64), version: int = 3, **counts: int) -> bytes:
    """A whole file; ``counts`` may lie about the number of tensors and pairs."""
    num_tensors, num_pairs = counts.get("num_tensors", len(tensors)), counts.get("num_pairs", len(pairs))
    start = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)
    return start + b"".join(pairs) + b"".join(tensors) + tail


ARCHITECTURE = pair("general.architecture", 8, text("llama"))
HUGE = 1 << 62

HOSTILE = {
    "empty": b"",
    "another format": b"PK\3\4" + bytes(64),
    "version 1": header([], [ARCHITECTURE], version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64),
    "cut in the counts": header([], [])[:12],
    "cut in the metadata": header([], [ARCHITECTURE], b"")[:-3],
    "cut in the tensors": header([tensor("a", [4])], [ARCHITECTURE], b"")[:-3],
    "cut in the data": header([tensor("a", [64])], [ARCHITECTURE], bytes(64)),
    "endless tensors": header([], [ARCHITECTURE], num_tensors=HUGE),
    "endless pairs": header([], [ARCHITECTURE], num_pairs=HUGE),
    "endless string": header([], [text("k") + struct.pack("<IQ", 8, HUGE)]),
    "endless numbers": header([], [pair("k", 9, struct.pack("<IQ", 4, HUGE))]),
    "endless bytes": header([], [pair("k", 9, struct.pack("<IQ", 0, (1 << 64) - 1))]),
    "endless strings": header([], [pair("k", 9, struct.pack("<IQ", 8, HUGE))]),
    "array of arrays": header([], [pair("k", 9, struct.pack("<IQ", 9, 1) * 40)]),
    "unknown value type": header([], [pair("k", 99, bytes(8))]),
    "unknown element type": header([], [pair("k", 9, struct.pack("<IQ", 99, 1))]),
    "bad UTF-8": header([], [pair("k", 8, text(b"\xff\xfe"))]),
    "duplicate key": header([], [ARCHITECTURE, ARCHITECTURE]),
    "duplicate tensor": header([tensor("a", [4]), tensor("a", [4])], [ARCHITECTURE]),
    "unknown tensor type": header([tensor("a", [4], kind=77)], [ARCHITECTURE]),
    "removed tensor type": header([tensor("a", [4], kind=4)], [ARCHITECTURE]),
    "no dims": header([tensor("a", [])], [ARCHITECTURE]),
    "endless dims": header([tensor("a", [4], num_dims=1 << 31)], [ARCHITECTURE]),
    "shape overflow": header([tensor("a", [1 << 33, 1 << 33])], [ARCHITECTURE]),
    "offset beyond the file": header([tensor("a", [4], offset=HUGE)], [ARCHITECTURE]),
    "rows of half a block": header([tensor("a", [16], kind=2)], [ARCHITECTURE]),
    "alignment 0": header([], [ARCHITECTURE, pair("general.alignment", 4, struct.pack("<I", 0))]),
    "alignment 3": header([], [ARCHITECTURE, pair("general.alignment", 4, struct.pack("<I", 3))]),
    "alignment as text": header([], [ARCHITECTURE, pair("general.alignment", 8, text("32"))]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str, tmp_path: Path) -> None:
    """A bad header is a ModelLoadError that names the file, at once, with no memory taken and nothing left open."""
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name])
    started = time.perf_counter()
    with measure_peak() as peak, pytest.raises(ModelLoadError, match=r"model\.gguf: not a valid GGUF file: ") as caught:
        open_checkpoint(str(path))
    assert time.perf_counter() - started < 1
    assert peak.nbytes < 20e6
    assert caught.tb is not None  # whose frames would keep an open file alive
    assert not holds(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """A file that ends anywhere before its last tensor is a ModelLoadError, never another error or a wrong model."""
    whole = write_gguf(tmp_path / "whole.gguf", CONFIG, TENSORS).read_bytes()
    path = tmp_path / "model.gguf"
    for length in [*range(0, 1500, 7), *range(1500, len(whole) - 64, 4099)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            open_checkpoint(str(path))
