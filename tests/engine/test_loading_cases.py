"""Ways in which loading and arithmetic have been wrong elsewhere, seen from outside: the engine's numbers against REF's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import models, ref
from helpers.checks import (
    Canary,
    assert_clean,
    assert_idle_and_whole,
    generate_ids,
    greedy_params,
    logprob_matrix,
    result,
)

from minipage import LLM

SEED = 6
NEW = 8
VOCAB = models.VOCAB_SIZE
Array = npt.NDArray[Any]


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens."""
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 64, **settings})


def all_logprobs(llm: LLM, prompt: list[int]) -> Array:
    """Log probabilities [T, V] after each token of a prompt."""
    [out] = llm.generate([prompt], greedy_params(1, logprobs=VOCAB, prompt_logprobs=VOCAB), use_tqdm=False)
    return logprob_matrix([*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]], VOCAB)


def assert_equals_ref(folder: Path, settings: dict[str, Any] | None = None) -> None:
    """The engine's log probabilities are REF's, and nothing is left behind."""
    prompt = models.history_prompt(SEED)
    with open_llm(folder, **(settings or {})) as llm:
        np.testing.assert_allclose(
            all_logprobs(llm, prompt), ref.log_softmax(ref.Reference(folder).logits(prompt)), atol=1e-4, rtol=0
        )
        assert_idle_and_whole(llm)


# ---- tied, missing and extra tensors -----------------------------------------------------------------------------------


def write(path: Path, changes: dict[str, Array | None], **overrides: Any) -> Path:
    """The history model with tensors changed, added, or (None) left out."""
    config = {**models.HISTORY_CONFIG, **overrides}
    tensors: dict[str, Any] = {**models.history_tensors(SEED, config), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    return models.write_folder(path, config, {name: t for name, t in tensors.items() if t is not None})


def random_tensor(*shape: int) -> Array:
    """Something to fill a tensor with that no test expects to see."""
    return np.random.default_rng(99).normal(0, 1, shape).astype(np.float32)


def test_tied_head(tmp_path: Path) -> None:
    """With tied embeddings and no head in the file, the embeddings are the head."""
    assert_equals_ref(write(tmp_path, {}, tie_word_embeddings=True))


def test_tied_head_beside_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With tied embeddings a different head in the file is not used, and a warning says so."""
    folder = write(tmp_path, {"lm_head.weight": random_tensor(VOCAB, 32)}, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equals_ref(folder)
    assert any("lm_head.weight" in text for text in [*map(str, (w.message for w in caught)), *caplog.messages])


@pytest.mark.parametrize("tie", [False, None])
def test_missing_head(tmp_path: Path, tie: bool | None) -> None:
    """Untied, as a Llama is unless its config says otherwise, a missing head is an error that names it."""
    folder = write(tmp_path, {"lm_head.weight": None}, tie_word_embeddings=False)
    models.edit_json(folder / "config.json", {}, remove=["tie_word_embeddings"] if tie is None else [])
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        open_llm(folder)


def test_known_buffers_are_ignored(tmp_path: Path) -> None:
    """Buffers that old checkpoints carry along are not weights."""
    buffers: dict[str, Array | None] = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": random_tensor(4),
        "model.layers.1.self_attn.rotary_emb.inv_freq": random_tensor(4),
    }
    assert_equals_ref(write(tmp_path, buffers))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.self_attn.q_norm.weight", random_tensor(8)),
        ("model.layers.2.mlp.up_proj.weight", random_tensor(48, 32)),
        ("model.layers.0.self_attn.q_proj.bias", random_tensor(32)),
        ("model.layers.1.self_attn.k_proj.weight", None),
        ("model.layers.0.input_layernorm.weight", None),
        ("model.embed_tokens.weight", None),
        ("model.layers.1.mlp.down_proj.weight", random_tensor(48, 32)),
        ("model.norm.weight", random_tensor(31)),
    ],
)
def test_unknown_missing_or_misshapen(tmp_path: Path, name: str, tensor: Array | None) -> None:
    """A tensor too many, too few or of another shape is an error that names tensor and file: no weight is ever made up."""
    folder = write(tmp_path, {name: tensor})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        open_llm(folder)
    assert "model.safetensors" in str(error.value) or str(folder) in str(error.value)


# ---- float32 where it matters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_far_out(tmp_path: Path, dtype: str) -> None:
    """With 16-bit weights and cache, positions up to 4095 stay true to float64: phases are not rounded to half precision."""
    folder = models.history_model(tmp_path, SEED, dtype=dtype)
    model = ref.Reference(folder)
    prompt = models.history_prompt(SEED, 4095)
    expected = model.logits(prompt)
    with open_llm(folder, dtype="auto", num_blocks=1100) as llm:
        for length in (1, 256, 4095):
            [out] = llm.generate([prompt[:length]], greedy_params(1, logprobs=VOCAB), use_tqdm=False)
            [found] = logprob_matrix(out.outputs[0].logprobs, VOCAB)
            assert cosine(found, ref.log_softmax(expected[length - 1])) > 0.999
        assert_idle_and_whole(llm)


def cosine(a: Array, b: Array) -> float:
    """Cosine similarity of two vectors once their means are taken off."""
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("magnitude", [300.0, 7600.0])
def test_large_hidden_states(tmp_path: Path, magnitude: float, dtype: str) -> None:
    """Hidden states whose squares overflow float16 pass the norms: variances are taken in float32."""
    tensors = models.history_tensors(SEED)
    tensors["model.embed_tokens.weight"] *= magnitude / 0.4
    folder = models.write_folder(tmp_path, models.HISTORY_CONFIG, tensors, dtype=dtype)
    prompt = models.history_prompt(SEED)
    expected = ref.log_softmax(ref.Reference(folder).logits(prompt))
    with open_llm(folder, dtype="auto") as llm:
        found = all_logprobs(llm, prompt)
    assert np.all(np.isfinite(found))
    assert min(map(cosine, found, expected)) > 0.999


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.5])
def test_eps_is_read(tmp_path: Path, eps: float) -> None:
    """The norms' epsilon is the config's, small as the hidden states may be."""
    tensors = models.history_tensors(SEED)
    tensors["model.embed_tokens.weight"] *= 0.01
    assert_equals_ref(models.write_folder(tmp_path, {**models.HISTORY_CONFIG, "rms_norm_eps": eps}, tensors))


def test_large_logits(tmp_path: Path) -> None:
    """Logits of ten thousand and more give finite logprobs, zero for a certain token."""
    tensors = models.history_tensors(SEED)
    tensors["lm_head.weight"] *= 1e4
    folder = models.write_folder(tmp_path, models.HISTORY_CONFIG, tensors)
    prompt = models.history_prompt(SEED)
    logits = ref.Reference(folder).logits(prompt)
    assert np.abs(logits).max() > 1e4
    with open_llm(folder) as llm:
        np.testing.assert_allclose(all_logprobs(llm, prompt), ref.log_softmax(logits), rtol=1e-5, atol=0.1)
        [out] = llm.generate([prompt], greedy_params(1, logprobs=1), use_tqdm=False)
    assert list(out.outputs[0].token_ids) == [int(np.argmax(logits[-1]))]
    assert out.outputs[0].cumulative_logprob == pytest.approx(0.0, abs=1e-6)


def test_float16_overflow_is_reported(tmp_path: Path) -> None:
    """A weight that float16 cannot hold is an error when it is loaded as such, not an infinity."""
    tensors = models.history_tensors(SEED)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    folder = models.write_folder(tmp_path, models.HISTORY_CONFIG, tensors)
    with pytest.raises(ValueError, match="float16"):
        open_llm(folder, dtype="float16")
    assert_equals_ref(folder)


# ---- infinities and fast arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
def test_windows(tmp_path: Path, window: int, num_threads: int) -> None:
    """Slices in which all but one score is masked give what REF and the plain NumPy ops give."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    folder = models.history_model(tmp_path, SEED, **mistral)
    model = ref.Reference(folder)
    prompt = models.history_prompt(SEED, 9)
    expected = ref.log_softmax(model.logits(prompt, window))
    for settings in ({"num_threads": num_threads}, {"device": "reference"}):
        with open_llm(folder, **settings) as llm:
            for length in range(1, 10):
                found = all_logprobs(llm, prompt[:length])
                np.testing.assert_allclose(found, expected[:length], atol=1e-4, rtol=0)
            assert_idle_and_whole(llm)


def test_all_but_one_token_banned(
    history: Callable[[int], Path], oracle: Callable[[int], ref.Reference], canary: Callable[[int], Canary]
) -> None:
    """With every other logit at minus infinity, the one token left is chosen, greedily or not; with none left, it is an error."""
    prompt = models.history_prompt(SEED, 5)
    bans = {i: float("-inf") for i in range(VOCAB) if i != 17}
    with open_llm(history(SEED)) as llm:
        for temperature in (0.0, 1.0, 5.0):
            params = greedy_params(NEW, temperature=temperature, seed=1, logit_bias=bans, logprobs=0)
            [out] = llm.generate([prompt], params, use_tqdm=False)
            assert list(out.outputs[0].token_ids) == [17] * NEW
            assert all(np.isfinite(row[17].logprob) for row in out.outputs[0].logprobs)
        none_left = greedy_params(NEW, logit_bias={i: float("-inf") for i in range(VOCAB)})
        outs = llm.generate([prompt, prompt], [none_left, greedy_params(NEW)], use_tqdm=False)
        assert outs[0].outputs[0].finish_reason == "abort"
        assert list(outs[0].outputs[0].token_ids) == []
        assert outs[0].outputs[0].stop_reason
        assert list(outs[1].outputs[0].token_ids) == ref.greedy(oracle(SEED), prompt, NEW)
        assert_clean(llm, canary(SEED))


def test_nan_weights_are_noticed(tmp_path: Path) -> None:
    """Logits that are NaN end the request with an error; they are not taken for token 0."""
    tensors = models.history_tensors(SEED)
    tensors["model.norm.weight"][:] = np.nan
    folder = models.write_folder(tmp_path, models.HISTORY_CONFIG, tensors)
    with open_llm(folder) as llm:
        [out] = llm.generate([models.history_prompt(SEED)], greedy_params(NEW, logprobs=2), use_tqdm=False)
        assert result(out.outputs[0]).token_ids == ()
        assert out.outputs[0].finish_reason == "abort"
        assert "nan" in str(out.outputs[0].stop_reason).lower()
        assert_idle_and_whole(llm)


# ---- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 4), (3, 1, 20), (4, 4, 80), (6, 2, 96), (2, 1, 128), (1, 1, 256), (65, 5, 2)],
)
def test_odd_shapes(tmp_path: Path, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Heads of any number and even size, and blocks of any size, give REF's numbers."""
    overrides = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    folder = models.history_model(tmp_path, SEED, **overrides)
    assert_equals_ref(folder, {"block_size": block_size})


def test_odd_head_size_is_refused(tmp_path: Path) -> None:
    """A head size that cannot be rotated in halves is an error when the model is loaded."""
    with pytest.raises(ValueError, match="head_dim"):
        open_llm(models.history_model(tmp_path, SEED, head_dim=33))


@pytest.fixture(scope="module")
def block_cases(oracle: Callable[[int], ref.Reference]) -> list[tuple[list[int], list[int]]]:
    """Prompts of lengths around one block and many, and what follows them."""
    model = oracle(SEED)
    prompts = ref.safe_prompts(model, [1, 3, 4, 5, 63, 64, 65, 257], NEW, seed=8)
    return [(prompt, ref.greedy(model, prompt, NEW)) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 2, 33])
def test_contexts_around_a_block(
    history: Callable[[int], Path], block_cases: list[tuple[list[int], list[int]]], batch: int
) -> None:
    """Contexts of a block, one less, one more, and many blocks, in batches."""
    members = [block_cases[i % len(block_cases)] for i in range(batch)]
    with open_llm(history(SEED), num_blocks=600) as llm:
        found = generate_ids(llm, [prompt for prompt, _ in members], greedy_params(NEW))
        assert found == [expected for _, expected in members]
