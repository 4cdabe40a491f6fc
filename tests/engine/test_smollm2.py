"""A real model end to end: SmolLM2-135M-Instruct, the demo model, from its GGUF file to text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import ref
from helpers.checks import assert_idle_and_whole, greedy_params

from minipage import LLM, SamplingParams
from minipage.engine import loading
from minipage.weights.checkpoint import Checkpoint

STORY = "Once upon a time"
STORY_GOES_ON = ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
#: The beginning of Alice's Adventures in Wonderland, by Lewis Carroll (1865).
BOOK = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice \
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use \
of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), \
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when \
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say \
to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought \
to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of \
its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet.
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model in float32, prompts in chunks of 16 tokens."""
    with LLM(device="cpu", dtype="float32", num_blocks=64, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        yield llm
        assert_idle_and_whole(llm)


def greedy_text() -> SamplingParams:
    """Greedy until the model's own end."""
    return SamplingParams(temperature=0.0, max_tokens=24)


def test_story(llm: LLM) -> None:
    """The greedy continuation is the one that the model is known for."""
    [out] = llm.generate(STORY, greedy_text(), use_tqdm=False)
    assert out.outputs[0].text.startswith(STORY_GOES_ON)
    assert out.prompt == STORY


def test_chat(llm: LLM) -> None:
    """The chat template makes a question of it, and the answer ends by itself."""
    [out] = llm.chat(QUESTION, greedy_text(), use_tqdm=False)
    assert out.outputs[0].text == ANSWER
    assert out.outputs[0].finish_reason == "stop"


def test_stream_beside_another(llm: LLM) -> None:
    """Streamed pieces join to what the same request gives alone, while another is served beside it."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    llm.engine.add_request("beside", "The three primary colours are", params)
    pieces = [out.outputs[0].delta_text for out in llm.stream(STORY, params)]
    assert len(pieces) == 8
    assert len("".join(pieces)) > 20
    assert STORY_GOES_ON.startswith("".join(pieces))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_logits_at_every_position(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits at each position of a text are those of an independent forward in float64, within 1e-4."""
    rows = []
    logits_of = llm.engine.runner.logits

    def spy(indices: list[int]) -> np.ndarray:
        rows.append(np.array(logits_of(indices)))
        return logits_of(indices)

    monkeypatch.setattr(llm.engine.runner, "logits", spy)
    [out] = llm.generate(STORY + STORY_GOES_ON, greedy_params(1, prompt_logprobs=0), use_tqdm=False)
    found = np.concatenate(rows)
    assert len(found) == len(out.prompt_token_ids)
    expected = ref.Reference(llm.info.path).logits(out.prompt_token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


class Shuffled:
    """The tensors of a Llama whose hidden and MLP dimensions are in another order: it computes the same.

    The file's weights have 4 bits in groups of 32 inputs, which would fit into the kind int4 again as they are. These do not.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        rng, config = np.random.default_rng(0), checkpoint.config
        self._source = checkpoint.source
        self._hidden, self._inter = map(rng.permutation, (config["hidden_size"], config["intermediate_size"]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def kind(self, name: str) -> None:
        """Whatever is asked for."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if layer in ("gate_proj", "up_proj"):
            rows = self._source.read(name)[self._inter][start:stop]
        elif layer in ("o_proj", "down_proj") or layer.endswith("norm"):
            rows = self._source.read(name)[self._hidden][start:stop]
        else:
            rows = self._source.read(name, start, stop)
        if layer != "o_proj" and rows.ndim == 2:
            rows = rows[:, self._inter if layer == "down_proj" else self._hidden]
        return np.ascontiguousarray(rows)


def perplexity(llm: LLM) -> float:
    """exp of the mean surprise at the tokens of BOOK."""
    [out] = llm.generate(BOOK, greedy_params(1, prompt_logprobs=0), use_tqdm=False)
    entries = zip(out.prompt_token_ids[1:], (out.prompt_logprobs or [])[1:], strict=True)
    logprobs = [entry[token].logprob for token, entry in entries if entry is not None]
    assert len(logprobs) == len(out.prompt_token_ids) - 1 > 200
    return math.exp(-sum(logprobs) / len(logprobs))


def test_what_quantisation_costs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity grows by less than 1% with weights of int8, and by less than 5% with those of int4."""

    def shuffled(path: str) -> Checkpoint:
        checkpoint = open_checkpoint(path)
        return replace(checkpoint, source=Shuffled(checkpoint))  # type: ignore[arg-type]

    open_checkpoint = loading.open_checkpoint
    monkeypatch.setattr(loading, "open_checkpoint", shuffled)
    expected = perplexity(llm)
    for kind, most in (("int8", 1.01), ("int4", 1.05)):
        with LLM(device="cpu", dtype="float32", quantization=kind, num_blocks=64, max_num_seqs=1) as other:
            assert kind in other.info.weight_kinds
            assert 0.99 < perplexity(other) / expected < most, kind
