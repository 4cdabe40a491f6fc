"""SamplingParams: the defaults of the contract, what is normalised, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from minipage.errors import InvalidArgumentError
from minipage.outputs import CompletionOutput, Logprob, RequestOutput
from minipage.sampling_params import SamplingParams

DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "max_tokens": 16,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "skip_special_tokens": True,
}


def test_fields_and_defaults_are_those_of_the_contract() -> None:
    """The names, their order and the defaults are the documented ones, and no other keyword is taken."""
    assert {field.name: field.default for field in dataclasses.fields(SamplingParams)} == DEFAULTS
    assert [field.name for field in dataclasses.fields(SamplingParams)] == list(DEFAULTS)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


REFUSED: list[tuple[str, Any]] = [
    *(("n", bad) for bad in (0, -1, 129, 5_000_000, True, 1.0, "1", None)),
    *(("temperature", bad) for bad in (-0.1, math.nan, math.inf, True, "1", None, 10**400)),
    *(("top_p", bad) for bad in (0, -0.1, 1.01, math.nan, False)),
    *(("top_k", bad) for bad in (-2, 2**31, 1.5, True, math.nan)),
    *(("min_p", bad) for bad in (-0.1, 1.01, math.nan)),
    *(("repetition_penalty", bad) for bad in (0, -1.0, 1e-3, 101, math.inf, math.nan)),
    *(("presence_penalty", bad) for bad in (-2.1, 2.1, math.nan)),
    *(("frequency_penalty", bad) for bad in (-2.1, 2.1, -math.inf)),
    *(("seed", bad) for bad in (2**64, -(2**63) - 1, 1.0, True, "0", 10**5000)),
    *(("stop", bad) for bad in ("", ["", "a"], [5], ["a", None], 5, b"a", ["x"] * 10_000, "x" * 2**20, {"a": 1})),
    *(("stop_token_ids", bad) for bad in ([-1], [True], [1.5], ["3"], [2**31], [2**40], 3, "3", [0] * 5001)),
    *((flag, bad) for flag in ("include_stop_str_in_output", "ignore_eos") for bad in (1, None, "yes")),
    ("skip_special_tokens", 0),
    *(("min_tokens", bad) for bad in (-1, 17, True, 0.5)),
    *(("max_tokens", bad) for bad in (0, -1, 10**12, math.inf, True)),
    *((name, bad) for name in ("logprobs", "prompt_logprobs") for bad in (-2, -1, 129, 2 * 10**9, True, 1.0)),
    *(("logit_bias", bad) for bad in ({-1: 1.0}, {True: 1.0}, {"3": 1.0}, {1.5: 1.0}, {2**31: 1.0}, [1], 3)),
    *(("logit_bias", {4: bad}) for bad in (math.nan, math.inf, 1e31, -1e31, "1", None, True)),
    ("logit_bias", dict.fromkeys(range(5001), 1.0)),
]


@pytest.mark.parametrize(
    ("name", "value"), REFUSED, ids=lambda value: str(value)[:20] if isinstance(value, str) else ""
)
def test_refusals_name_field_value_and_what_is_allowed(name: str, value: Any) -> None:
    """A bad value is one short ValueError with the field's name and what is allowed, whatever the value is."""
    with pytest.raises(InvalidArgumentError, match=rf"\b{name}\b.*; allowed: ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 5_000_000}, "n is 5000000; allowed: an integer from 1 to 128"),
        ({"stop_token_ids": [3, -1]}, "an id of stop_token_ids is -1; allowed: an integer from 0 to 2147483647"),
        ({"logit_bias": {7: math.nan}}, "the logit_bias of id 7 is nan; allowed: -1e+30 to 1e+30, or -inf"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; allowed: up to max_tokens, which is 8"),
        ({"top_p": 0}, "top_p is 0; allowed: a finite number, more than 0, up to 1"),
    ],
)
def test_messages(arguments: dict[str, Any], message: str) -> None:
    """Whole messages, as a user reads them."""
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "hostile",
    [
        {"n": 5_000_000},
        {"max_tokens": 10**12},
        {"logprobs": 2 * 10**9},
        {"seed": 10**100_000},
        {"stop": ["stop"] * 10_000},
        {"stop": "x" * 2**20},
        {"stop_token_ids": range(10**15)},
        {"logit_bias": dict.fromkeys(range(200_000), 1.0)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_hostile_sizes_are_refused_at_once(hostile: dict[str, Any]) -> None:
    """The refusal takes less than 100 ms and allocates less than a megabyte."""
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(InvalidArgumentError):
        SamplingParams(**hostile)
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.1
    assert peak < 2**20


def test_values_are_normalised() -> None:
    """Numbers of any kind, NumPy's among them, become Python's; stops become tuples, the bias a dict, top_k=-1 is 0."""
    params = SamplingParams(
        n=np.int64(2),
        temperature=0,
        top_p=np.float32(0.5),
        top_k=-1,
        seed=np.uint64(2**64 - 1),
        stop="END",
        stop_token_ids=np.array([3, 4]),
        max_tokens=np.int32(5),
        logprobs=np.uint8(3),
        logit_bias={np.int64(3): np.float32(1), 4: -math.inf, 5: 2},
    )
    assert (params.n, params.temperature, params.top_p, params.top_k) == (2, 0.0, 0.5, 0)
    assert (params.seed, params.max_tokens, params.logprobs) == (2**64 - 1, 5, 3)
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert params.logit_bias == {3: 1.0, 4: -math.inf, 5: 2.0}
    values = [params.n, params.top_k, params.seed, params.max_tokens, params.logprobs, *params.stop_token_ids]
    assert {type(value) for value in values} == {int}
    assert {type(value) for value in (params.temperature, params.top_p, *params.logit_bias.values())} == {float}
    assert {type(key) for key in params.logit_bias} == {int}


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, ()), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ({"a"}, ("a",))],
)
def test_stop_is_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    """None and an empty list are no stops, a plain string is one, a list keeps its order."""
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(
    "extreme",
    [
        {"n": 128},
        {"temperature": 1e-9},
        {"temperature": 1e9},
        {"top_p": 1e-9},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 2**31 - 1},
        {"max_tokens": 2**31 - 1},
        {"min_tokens": 16},
        {"logprobs": 0, "prompt_logprobs": 128},
        {"stop": ["x" * 256] * 256},
        {"stop_token_ids": list(range(5000))},
        {"logit_bias": dict.fromkeys(range(5000), -1e30)},
    ],
    ids=str,
)
def test_extremes_are_allowed(extreme: dict[str, Any]) -> None:
    """What the messages say is allowed is allowed, up to its ends."""
    params = SamplingParams(**extreme)
    assert params == SamplingParams(**extreme)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logprobs": 62}, "logprobs is 62; allowed: an integer from 0 to 61"),
        ({"prompt_logprobs": 62}, "prompt_logprobs is 62; allowed: an integer from 0 to 61"),
        ({"stop_token_ids": [3, 61]}, "an id of stop_token_ids is 61; allowed: an integer from 0 to 60"),
        ({"logit_bias": {61: 1.0}}, "an id of logit_bias is 61; allowed: an integer from 0 to 60"),
    ],
)
def test_the_vocabulary_bounds_ids_and_logprobs(arguments: dict[str, Any], message: str) -> None:
    """Ids of the vocabulary and as many logprobs as it has pass; one more is refused by name."""
    SamplingParams(logprobs=61, prompt_logprobs=61, stop_token_ids=[0, 60], logit_bias={60: 1}).validate_for_vocab(61)
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**arguments).validate_for_vocab(61)
    assert str(caught.value) == message


def test_a_clone_shares_nothing_and_is_checked() -> None:
    """Changing the original, or the dict and list that it was made of, leaves a clone alone; a bad change is found."""
    bias, stops = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops, max_tokens=4)
    clone = params.clone()
    bias[2] = 2.0
    stops.append("b")
    params.logit_bias[3] = 3.0  # type: ignore[index]
    params.max_tokens = 1
    assert (clone.logit_bias, clone.stop, clone.max_tokens) == ({1: 1.0}, ("a",), 4)
    assert copy.deepcopy(clone) == clone
    params.max_tokens = 0
    with pytest.raises(InvalidArgumentError, match="max_tokens is 0"):
        params.clone()


def test_outputs_print_on_a_few_lines() -> None:
    """The repr of an output shows the text and the first token ids, and no logprobs."""
    logprobs = [{i: Logprob(-1.0, 1, "x")} for i in range(2000)]
    completion = CompletionOutput(0, " Paris.", list(range(2000)), -2000.0, logprobs, "length", None)
    output = RequestOutput("7", "Where?", [1, 2, 3], 0, None, [completion], True)
    assert repr(output) == (
        "RequestOutput(request_id='7', prompt='Where?', prompt_token_ids=[1, 2, 3], outputs=[CompletionOutput(index=0, "
        "text=' Paris.', token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 2000 in all], finish_reason='length', "
        "stop_reason=None)], finished=True)"
    )
