"""`minipage inspect` agrees with what an engine allocates, and with sums made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_files import write_gguf
from helpers.models import HISTORY_CONFIG, VOCAB_SIZE, history_model, history_tensors

from minipage import LLM
from minipage.inspection import SHAREGPT_MEAN_LENGTHS, ModelReport, inspect_model

Run = Callable[..., tuple[int, str, str]]


def test_inspect_agrees_with_what_is_allocated(tmp_path: Path) -> None:
    """Weights in every kind, bytes of a block and their number are those of an engine with the same keywords."""
    path = str(history_model(tmp_path, seed=3))
    for dtype, quantization in (
        ("float32", None),
        ("bfloat16", None),
        ("float16", None),
        ("bfloat16", "int8"),
        ("float32", "int4"),
    ):
        keywords: dict[str, Any] = {"device": "cpu", "dtype": dtype, "block_size": 8}
        report = inspect_model(path, **keywords)
        with LLM(path, quantization=quantization, kv_cache_memory="1MB", **keywords) as llm:
            assert report.weight_bytes[quantization or dtype] == llm.info.weight_bytes
            assert_agrees(report, llm)
    keywords = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_cache_dtype": "int8"}
    with LLM(path, kv_cache_memory="1MB", **keywords) as llm:
        assert_agrees(inspect_model(path, **keywords), llm)


def assert_agrees(report: ModelReport, llm: LLM) -> None:
    """The KV cache of 1 MB is what the report says."""
    assert report.kv_shape == llm.info.kv_shape
    capacity = report.capacity(10**6, length=100)
    assert capacity.num_blocks == llm.stats().num_blocks
    assert capacity.num_tokens * report.kv_shape.bytes_per_token == llm.info.kv_cache_bytes


@pytest.mark.parametrize(
    "keywords", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "float32"}]
)
def test_inspect_agrees_on_a_quantised_file(keywords: dict[str, Any], tmp_path: Path) -> None:
    """A GGUF file of several types: the bytes of each kind, and the dtype of K and V, are those that are loaded."""
    config = {**HISTORY_CONFIG, "intermediate_size": 64}
    types = {"model.embed_tokens.weight": "Q8_0", "lm_head.weight": "F16"}
    tensors = history_tensors(3, config)
    vocabulary = {"model": "llama", "tokens": [f"t{i}" for i in range(VOCAB_SIZE)], "scores": [0.0] * VOCAB_SIZE}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    file = tmp_path / "model.gguf"
    path = str(write_gguf(file, config, tensors, matrix_type="Q4_1", types=types, metadata=metadata))
    report = inspect_model(path, device="cpu", **keywords)
    with LLM(path, device="cpu", kv_cache_memory="1MB", **keywords) as llm:
        assert report.weight_kinds == llm.info.weight_kinds
        assert sum(report.weight_kinds.values()) == llm.info.weight_bytes
        assert report.kv_shape == llm.info.kv_shape
    if not keywords:
        assert report.weight_kinds.keys() == {"int4", "int8", "float16", "float32"}
        assert report.kv_shape.dtype == "float16"


def test_inspect_counts_parameters_and_dtypes(tmp_path: Path) -> None:
    """The count is that of the tensors in the file, by the file's own dtypes; nothing is loaded to tell it."""
    path = history_model(tmp_path, seed=3, dtype="bfloat16")
    report = inspect_model(str(path), device="reference")
    assert report.num_parameters == sum(tensor.size for tensor in history_tensors(3).values())
    assert report.file_dtypes == {"BF16": report.num_parameters}
    assert report.file_bytes == (path / "model.safetensors").stat().st_size


def test_capacity_beside_a_static_cache(tmp_path: Path) -> None:
    """By hand: 4 MiB in blocks of 16 tokens of 256 bytes are 1024 blocks; a request of 499 tokens takes 32 of them, or one of
    16 rows of 1024 tokens. 13 of 512 slots are empty in pages, 525 of 1024 in a row: less than 4% is the paper's claim."""
    report = inspect_model(str(history_model(tmp_path, seed=3)), device="reference")
    assert report.kv_shape.bytes_per_token == 2 * 2 * 2 * 8 * 4
    capacity = report.capacity(4 << 20, sum(SHAREGPT_MEAN_LENGTHS), max_model_len=1024)
    assert (capacity.num_blocks, capacity.num_tokens) == (1024, 16384)
    assert (capacity.paged_requests, capacity.static_requests) == (32, 16)
    assert capacity.paged_waste == pytest.approx(13 / 512)
    assert capacity.static_waste == pytest.approx(525 / 1024)
    assert capacity.paged_waste < 0.04


def test_capacity_of_layers_with_a_window(tmp_path: Path) -> None:
    """A layer of each kind, as the engine groups them. By hand: a request of 100 tokens takes 25 blocks of 4 in the layer
    that sees all, and 11/4 rounded up, and one, in the one that sees 11; in all 4 * 29 slots for 111 tokens that are seen."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
    path = str(history_model(tmp_path, seed=3, **layers))
    report = inspect_model(path, device="reference", block_size=4)
    with LLM(path, device="reference", block_size=4, kv_cache_memory="64KiB") as llm:
        assert report.kv_shape == llm.info.kv_shape
        capacity = report.capacity(64 << 10, 100, max_model_len=200)
        assert capacity.num_blocks == llm.stats().num_blocks == 128
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert capacity.num_tokens == 256
    assert (capacity.paged_requests, capacity.static_requests) == (128 // 29, 65536 // (200 * 256))
    assert capacity.paged_waste == pytest.approx(1 - 111 / (4 * 29))
    assert capacity.static_waste == pytest.approx(1 - 111 / 400)


def test_inspect_prints_for_people_and_programs(run: Run) -> None:
    """The same numbers in words and as one JSON object."""
    code, out, _ = run("inspect", "--memory", "8MiB", "--length", "100", "--length", "200")
    assert code == 0
    code, text, _ = run("inspect", "--memory", "8MiB", "--length", "100", "--length", "200", "--json")
    report = json.loads(text)
    assert [capacity["length"] for capacity in report["capacity"]] == [100, 200]
    assert f"{report['num_parameters']:,}" in out
    assert f"{report['capacity'][0]['num_tokens']:,} tokens" in out
    assert f"paged {report['capacity'][1]['paged_requests']} at once" in out


def test_inspect_refuses_lengths_that_the_model_does_not_take(run: Run) -> None:
    """A request longer than the longest sequence has no place anywhere."""
    code, _, err = run("inspect", "--length", "5000")
    assert code == 2
    assert "length=5000" in err and "4096" in err
