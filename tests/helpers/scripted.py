"""Scripted models with tiny tokenizers: what they say is written down, so that text and its end can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import tokenizers

from minipage import LLM, RequestOutput, SamplingParams

V = 320  #: tokens of the scripted models: more than either tokenizer has
BOS, END, STOP = (tokenizers.f3_backend().token_to_id(text) for text in tokenizers.F3_SPECIALS)
START = ord("^")  #: the prompt of most scripts

OpenScript = Callable[..., LLM]  #: from chains of tokens, and keywords of the fixture ``open_script``


def serve(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, list[str]]:
    """The final output and the pieces of text that were streamed, which are checked to agree with each other."""
    pieces, last = [], None
    for last in llm.stream(prompt, params):
        pieces.append(last.outputs[0].delta_text)
        assert "".join(pieces) == last.outputs[0].text
    assert last is not None and last.finished
    [whole] = llm.generate([prompt], params, use_tqdm=False)
    for streamed, at_once in zip(last.outputs, whole.outputs, strict=True):
        assert (streamed.text, streamed.token_ids, streamed.logprobs) == (
            at_once.text,
            at_once.token_ids,
            at_once.logprobs,
        )
        assert (streamed.finish_reason, streamed.stop_reason) == (at_once.finish_reason, at_once.stop_reason)
        if streamed.logprobs is not None:
            assert len(streamed.logprobs) == len(streamed.token_ids)
            chosen = (row[i].logprob for row, i in zip(streamed.logprobs, streamed.token_ids, strict=True))
            assert streamed.cumulative_logprob == pytest.approx(sum(chosen))
    return whole, [piece for piece in pieces if piece]


def say(text: str, *, then: Sequence[int] = (END,)) -> list[int]:
    """A chain from START through the bytes of ``text``, which may use each byte once."""
    return [START, *text.encode(), *then]
