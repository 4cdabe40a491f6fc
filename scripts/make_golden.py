"""Make tests/models/golden: tiny random checkpoints, and what the transformers library computes from them.

The tests compare minipage with these files and so need neither torch nor transformers. Making them anew needs both, in
an environment of its own:

    python3 -m venv golden-env && golden-env/bin/pip install torch transformers
    golden-env/bin/python scripts/make_golden.py

Each folder holds a checkpoint and golden.npz: ``prompt`` [T] int64, ``logits`` [T, V] float32 after each of its tokens,
and ``greedy`` [n] int64, the most likely tokens that follow it. Some also hold beams.json: the end-of-sequence ids, and
beam searches with the hypotheses that they find, the best first.

With names of folders as arguments only the beams of these are made anew.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "models" / "golden"
GREEDY_TOKENS = 16
SMALLEST_GAP = 0.01  #: between the two best logits of every greedy step, so that rounding cannot change the winner

BEAM_MODELS = ("llama-mha", "llama-tied-head-dim", "mistral-bfloat16")
BEAM_TOKENS = 8
BEAM_PROMPT_LENGTH = 11
NUM_EOS = 4
BEAM_SETTINGS = tuple(itertools.product((2, 3, 4), (0.5, 1.0, 2.0), (False, True, "never")))

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Golden(NamedTuple):
    """One checkpoint to make: config overrides, storage, length of the prompt, and whether rope is spelt as of old."""

    name: str
    overrides: dict[str, Any]
    dtype: torch.dtype = torch.float32
    prompt_length: int = 24
    old_rope_key: str | None = (
        None  #: "type" or "rope_type": write rope_theta and rope_scaling instead of rope_parameters
    )
    mistral: bool = False


MODELS = (
    Golden("llama-mha", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    Golden("llama-tied-head-dim", {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    Golden("llama-biases-bfloat16", {"attention_bias": True, "mlp_bias": True}, torch.bfloat16),
    Golden(
        "llama-linear",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        prompt_length=48,
        old_rope_key="type",
    ),
    Golden(
        "llama-dynamic",
        {
            "head_dim": 16,
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
        prompt_length=64,
        old_rope_key="type",
    ),
    Golden(
        "llama-llama3-mqa",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        torch.float16,
        prompt_length=96,
    ),
    Golden(
        "llama-yarn",
        {
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        prompt_length=96,
        old_rope_key="rope_type",
    ),
    Golden(
        "llama-yarn-given-factor",
        {
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 0.75,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
            },
        },
        prompt_length=96,
    ),
    Golden("mistral-bfloat16", {"head_dim": 12, "sliding_window": None}, torch.bfloat16, mistral=True),
)


def random_model(golden: Golden) -> Any:
    """A model whose norms and biases are random as well, so that none of them can be left out unseen."""
    torch.manual_seed(sum(golden.name.encode()))
    config_class, model_class = (
        (MistralConfig, MistralForCausalLM) if golden.mistral else (LlamaConfig, LlamaForCausalLM)
    )
    model = model_class(config_class(**SHAPE | golden.overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model.to(golden.dtype)


def spell_rope_as_of_old(config_path: Path, key: str) -> None:
    """Rewrite ``rope_parameters`` as the ``rope_theta`` and ``rope_scaling`` that checkpoints of earlier years have."""
    config = json.loads(config_path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {key: rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def run(model: Any, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits [T, V] of the prompt and the greedy continuation, one token at a time over a cache.

    One at a time because dynamic rope turns a whole prompt by its final length and a token by the length so far; the
    latter is what decoding does, and for all other kinds there is no difference.
    """
    cache, logits, token_ids = DynamicCache(config=model.config), [], list(prompt)
    for position in range(len(prompt) + GREEDY_TOKENS - 1):
        out = model(torch.tensor([[token_ids[position]]]), cache=cache)
        logits.append(out.logits[0, -1].numpy())
        if position + 1 == len(token_ids):
            token_ids.append(int(logits[-1].argmax()))
    return np.stack(logits).astype(np.float32), token_ids[len(prompt) :]


def make(golden: Golden) -> None:
    """Write the folder of one golden model, with the first prompt that has no close call."""
    folder = GOLDEN / golden.name
    shutil.rmtree(folder, ignore_errors=True)
    model = random_model(golden)
    model.save_pretrained(folder)
    if golden.old_rope_key:
        spell_rope_as_of_old(folder / "config.json", golden.old_rope_key)
    for seed in range(1000):
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        prompt = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], golden.prompt_length)
        logits, greedy = run(model, prompt.tolist())
        best = np.sort(logits[golden.prompt_length - 1 :], axis=-1)
        if (best[:, -1] - best[:, -2]).min() >= SMALLEST_GAP:
            break
    else:
        raise RuntimeError(f"{golden.name}: every prompt has two logits closer than {SMALLEST_GAP}")
    np.savez_compressed(
        folder / "golden.npz", prompt=prompt, logits=logits[: golden.prompt_length], greedy=np.array(greedy)
    )
    print(f"{golden.name}: prompt seed {seed}, {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")


def search(
    model: Any, prompt: list[int], setting: tuple[Any, ...], eos: list[int] | None
) -> list[tuple[list[int], float]]:
    """The hypotheses of a beam search with their scores: generated tokens, up to the one that ends them."""
    num_beams, length_penalty, early_stopping = setting
    input_ids = torch.tensor([prompt])
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),  # else tokens that equal pad_token_id are taken for padding
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=BEAM_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [index for index, token in enumerate(tokens) if token in (eos or [])]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found


def make_beams(name: str) -> None:
    """Write beams.json of a golden model: for each setting the first prompt whose hypotheses rounding does not change."""
    folder = GOLDEN / name
    single, double = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.float64)
    )
    prompts = (
        np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], BEAM_PROMPT_LENGTH).tolist()
        for seed in itertools.count(500)
    )
    # Tokens that are likely end hypotheses, so that these are of different lengths.
    likely = [search(single, next(prompts), (4, 1.0, False), None) for _ in range(5)]
    counts = Counter(token for found in likely for tokens, _ in found for token in tokens[1:])
    eos = sorted(token for token, _ in counts.most_common(NUM_EOS))
    searches = []
    for setting in BEAM_SETTINGS:
        for prompt in prompts:
            found, exact = search(single, prompt, setting, eos), search(double, prompt, setting, eos)
            lengths = {len(tokens) for tokens, _ in found}
            if [tokens for tokens, _ in found] == [tokens for tokens, _ in exact] and len(lengths) > 1:
                break
        searches.append([prompt, *setting, found])
    (folder / "beams.json").write_text(json.dumps({"eos": eos, "searches": searches}) + "\n")
    print(f"{name}: {len(searches)} beam searches")


if __name__ == "__main__":
    if not sys.argv[1:]:
        for each in MODELS:
            make(each)
    for each_name in sys.argv[1:] or BEAM_MODELS:
        make_beams(each_name)
