"""Arguments of another kind than a call takes: each is one clear error, and no request but the caller's own is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checks import assert_idle_and_whole, greedy_params

from minipage import LLM, BeamSearchParams, SamplingParams
from minipage.errors import InvalidArgumentError

SEED = 3


@pytest.fixture(scope="module")
def shared(history: Callable[[int], Path]) -> Iterator[LLM]:
    """An engine without a tokenizer."""
    with LLM(str(history(SEED)), device="cpu", dtype="float32", block_size=4, num_blocks=64) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The engine, which each test has to leave whole."""
    yield shared
    assert_idle_and_whole(shared)


class Number:
    """What is neither a list nor anything else that an engine takes."""


@pytest.mark.parametrize(
    "bad", [{1, 2}, frozenset({"a"}), {1: 2}.keys(), np.array(5), 5, Number(), None, iter([1])], ids=type
)
def test_prompts_that_are_no_list(llm: LLM, bad: Any) -> None:
    """What has no order or no length is refused as prompts, and as messages."""
    for call in (llm.generate, llm.beam_search):
        with pytest.raises(InvalidArgumentError, match="prompts must be text, token ids, or a list"):
            call(bad)  # type: ignore[operator]
    with pytest.raises(InvalidArgumentError, match="messages must be a list of messages"):
        llm.chat(bad)


def test_one_message_is_no_conversation(llm: LLM) -> None:
    """A message outside a list is refused by name."""
    with pytest.raises(InvalidArgumentError, match=r"messages must be a list of messages.*, not dict"):
        llm.chat({"role": "user", "content": "hi"})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [5, 0, Number(), iter([SamplingParams()]), BeamSearchParams(), {"n": 1}], ids=type)
def test_params_of_another_kind(llm: LLM, bad: Any) -> None:
    """So are parameters that are not those of the call, those that count as false among them."""
    message = [{"role": "user", "content": "hi"}]
    for call in (lambda: llm.generate([1], bad), lambda: llm.chat(message, bad)):
        with pytest.raises(
            InvalidArgumentError, match="sampling_params must be SamplingParams, or a list of them, not"
        ):
            call()
    if not isinstance(bad, BeamSearchParams):
        with pytest.raises(InvalidArgumentError, match="beam_search takes BeamSearchParams, not"):
            llm.beam_search([1], bad)
        for call in (lambda: llm.stream([1], bad), lambda: llm.engine.add_request("bad", [1], bad)):
            with pytest.raises(InvalidArgumentError, match="must be SamplingParams or BeamSearchParams, not"):
                call()
    with pytest.raises(InvalidArgumentError, match="beam_search takes BeamSearchParams, not SamplingParams"):
        llm.beam_search([1], SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", "x"), ("n", None), ("stop_token_ids", 5), ("logprobs", "x"), ("temperature", -1), ("stop", 5)],
)
def test_params_that_were_changed(llm: LLM, field: str, value: Any) -> None:
    """Parameters that became nonsense after they were made are found out when they are used."""
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(InvalidArgumentError, match=f"{field} is {value!r}"):
        llm.generate([1], params)
    beams = BeamSearchParams()
    beams.beam_width = "x"  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match="beam_width is 'x'"):
        llm.beam_search([1], beams)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GB", "0." + "1" * 400, "1e9", "-1", "", "1\N{KELVIN SIGN}B"])
@pytest.mark.parametrize("name", ["kv_cache_memory", "swap_space"])
def test_sizes_that_are_none(history: Callable[[int], Path], name: str, size: str) -> None:
    """A size has a sane number of digits, and a unit, if any, of those that are named."""
    with pytest.raises(InvalidArgumentError, match=f"{name}=.* is not a size"):
        LLM(str(history(SEED)), device="cpu", **{name: size})  # type: ignore[arg-type]


def test_a_callers_ids_may_look_like_ours(llm: LLM) -> None:
    """``generate`` and ``stream`` name their requests as nobody does, and end no request but their own."""
    number = next(llm._ids)
    for offset in (1, 2, 4):
        llm.engine.add_request(f"llm-{number + offset}", [1, 2], greedy_params(40))
    first = llm.generate([[1], [2]], greedy_params(2), use_tqdm=False)
    streamed = list(llm.stream([1], greedy_params(2)))
    assert [len(out.outputs[0].token_ids) for out in [*first, streamed[-1]]] == [2, 2, 2]
    assert llm.stats().num_running == 3
    for offset in (1, 2, 4):
        assert llm.engine.abort(f"llm-{number + offset}") is not None


@pytest.mark.parametrize("salt", ["", 3, b"a", ["a"]])
def test_salts_that_keep_nothing_apart(llm: LLM, salt: Any) -> None:
    """A salt is a string with something in it: an empty one would share its prefixes with all who have none."""
    with pytest.raises(
        InvalidArgumentError, match=r"cache_salt=.* is not allowed; it must be a string that is not empty"
    ):
        llm.generate([1, 2], greedy_params(1), use_tqdm=False, cache_salt=salt)
