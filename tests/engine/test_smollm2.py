"""A real model end to end: SmolLM2-135M-Instruct, the demo model, from its GGUF file to text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers import ref
from helpers.checks import assert_idle_and_whole, greedy_params

from minipage import LLM, SamplingParams

STORY = "Once upon a time"
STORY_GOES_ON = ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


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
