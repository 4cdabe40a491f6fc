"""The config that a GGUF file's metadata is translated into, and what of it is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import CONFIG, TENSORS, opened, write_gguf

from minipage.errors import ModelLoadError
from minipage.models import parameters
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.loader import check

SCALING = "llama.rope.scaling."


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
    untyped = rope({SCALING + "factor": 8.0, "llama.rope.scale_linear": 4.0})  # not said to be of any kind
    assert (untyped.kind, untyped.factor) == ("linear", 8.0)
    assert rope({SCALING + "type": "none", SCALING + "factor": 8.0}).kind == "default"
    assert rope({SCALING + "factor": 0.0, "llama.rope.scale_linear": 4.0}).kind == "default"
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
        ({SCALING + "type": "linear", SCALING + "factor": 0.0}, r"factor is 0\.0"),
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
