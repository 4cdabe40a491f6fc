"""Arguments that other engines let through: refused at once, by name, and the engine serves on as if nothing had been."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.checks import Canary, assert_clean, assert_idle_and_whole, generate_ids, greedy_params

from minipage import LLM, SamplingParams

SEED = 3
MAX_NUM_SEQS = 4
VOCAB = models.VOCAB_SIZE


@pytest.fixture(scope="module")
def llm(history: Callable[[int], Path]) -> Iterator[LLM]:
    """An engine with four seats."""
    with LLM(
        str(history(SEED)), device="cpu", dtype="float32", block_size=4, num_blocks=64, max_num_seqs=MAX_NUM_SEQS
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def clean_after(llm: LLM, canary: Callable[[int], Canary]) -> Iterator[None]:
    """After each of these tests the engine is whole and answers as ever."""
    yield
    assert_clean(llm, canary(SEED))


def not_ids() -> list[Any]:
    """What is not a token id of the model."""
    return [-1, VOCAB, 2**31, 2**40, True, 1.5, "3", None, np.float32(2.0), np.int64(-1)]


@pytest.mark.parametrize("bad", not_ids(), ids=repr)
def test_prompt_ids_outside_the_vocabulary(llm: LLM, oracle: Callable[[int], ref.Reference], bad: Any) -> None:
    """Such an id in a prompt is refused with its value before anything is queued; mates in the engine run on."""
    [prompt] = ref.safe_prompts(oracle(SEED), [9], 8, seed=9)
    llm.engine.add_request("mate", prompt, greedy_params(8))
    llm.engine.step()
    for attempt in (
        lambda: llm.generate([[1, 2, bad, 3]], greedy_params(4), use_tqdm=False),
        lambda: llm.generate([[1, 2], [3, bad]], greedy_params(4), use_tqdm=False),
        lambda: llm.engine.add_request("bad", [1, bad], greedy_params(4)),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        assert repr(bad) in str(error.value)
    assert (llm.stats().num_running, llm.stats().num_waiting) == (1, 0)
    while llm.engine.has_unfinished_requests():
        outs = llm.engine.step()
    assert list(outs[0].outputs[0].token_ids) == ref.greedy(oracle(SEED), prompt, 8)


@pytest.mark.parametrize("bad", not_ids(), ids=repr)
@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_other_ids_outside_the_vocabulary(llm: LLM, field: str, bad: Any) -> None:
    """So it is in every field that holds token ids, which the error names."""
    with pytest.raises(ValueError, match=field):
        llm.generate(
            [[1, 2]], SamplingParams(**{field: [bad] if field == "stop_token_ids" else {bad: 1.0}}), use_tqdm=False
        )


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_long_lists_of_ids(llm: LLM, field: str) -> None:
    """Lists of more ids than anybody means are refused or harmless, at once."""
    ids = list(range(5001))
    with pytest.raises(ValueError, match=field):
        llm.generate(
            [[1, 2]],
            SamplingParams(**{field: ids if field == "stop_token_ids" else dict.fromkeys(ids, 1.0)}),
            use_tqdm=False,
        )


def test_numpy_ids_are_ids(llm: LLM, oracle: Callable[[int], ref.Reference]) -> None:
    """Prompts of NumPy integers, or a whole NumPy array, are token ids as good as any."""
    [prompt] = ref.safe_prompts(oracle(SEED), [9], 8, seed=9)
    expected = [ref.greedy(oracle(SEED), prompt, 8)]
    for given in ([np.int64(t) for t in prompt], np.array(prompt), np.array(prompt, dtype=np.uint8)):
        [out] = llm.generate([given], greedy_params(8, stop_token_ids=np.array([], dtype=np.int64)), use_tqdm=False)
        assert [list(out.outputs[0].token_ids)] == expected
        assert all(type(t) is int for t in [*out.prompt_token_ids, *out.outputs[0].token_ids])


UNBOUNDED: list[tuple[str, Any]] = [
    ("n", 5_000_000),
    ("n", 0),
    ("logprobs", -2),
    ("logprobs", -1),
    ("logprobs", VOCAB + 1),
    ("logprobs", 2_000_000_000),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", VOCAB + 1),
    ("prompt_logprobs", 2_000_000_000),
    ("stop", ["x" * 8] * 10_000),
    ("stop", "x" * 1_000_000),
    ("max_tokens", 10**12),
    ("max_tokens", 0),
    ("max_tokens", 10**400),
    ("min_tokens", 17),
    ("top_k", 10**12),
    ("seed", 2**70),
]


@pytest.mark.parametrize(("field", "value"), UNBOUNDED, ids=lambda value: repr(value)[:20])
def test_unbounded_counts(llm: LLM, field: str, value: Any) -> None:
    """Counts without measure are refused within 100 ms of work, taking no memory; a short error names the field."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(ValueError) as error:
        llm.generate([[1, 2]], SamplingParams(**{field: value}), use_tqdm=False)
    assert time.process_time() - start < 0.1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000  # KiB
    assert field in str(error.value)
    assert len(str(error.value)) < 500


def test_more_children_than_seats(llm: LLM) -> None:
    """A request for more completions than there are seats is refused, since it would never be scheduled."""
    with pytest.raises(ValueError, match="max_num_seqs"):
        llm.generate([[1, 2]], SamplingParams(n=MAX_NUM_SEQS + 1), use_tqdm=False)
    [out] = llm.generate([[1, 2]], SamplingParams(n=MAX_NUM_SEQS, max_tokens=3), use_tqdm=False)
    assert len(out.outputs) == MAX_NUM_SEQS


def test_prompts_that_never_fit(llm: LLM) -> None:
    """Empty prompts, and prompts longer than the pool or the model, are refused when they are added."""
    for prompt in ([], [1] * 300, [1] * 5000):
        with pytest.raises(ValueError):
            llm.engine.add_request("long", prompt, greedy_params(4))
    assert_idle_and_whole(llm)


def test_long_outputs_end_where_the_pool_does(llm: LLM) -> None:
    """max_tokens beyond the pool or the model is a limit, not a promise: the output ends with "length"."""
    [out] = llm.generate([[1, 2]], greedy_params(10**6), use_tqdm=False)
    assert out.outputs[0].finish_reason == "length"
    assert len(out.outputs[0].token_ids) == 64 * 4 + 1 - 2  # the last token needs no slot


def test_one_bad_prompt_stops_all_before_any_work(llm: LLM) -> None:
    """generate() refuses the whole list for one bad prompt, and for params that do not match in number."""
    before = llm.stats()
    with pytest.raises(ValueError):
        llm.generate([[1, 2], []], greedy_params(4), use_tqdm=False)
    with pytest.raises(ValueError, match="2"):
        llm.generate([[1, 2], [3]], [greedy_params(4)] * 3, use_tqdm=False)
    assert llm.stats() == before


def test_unknown_keywords(history: Callable[[int], Path]) -> None:
    """An unknown keyword is refused, never dropped."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="block_sise"):
        LLM(str(history(SEED)), block_sise=4)  # type: ignore[call-arg]


def test_request_ids_are_unique(llm: LLM) -> None:
    """An id that is in use is refused; once the request has ended it may be used again."""
    llm.engine.add_request("same", [1, 2], greedy_params(3))
    with pytest.raises(ValueError, match="same"):
        llm.engine.add_request("same", [1, 2], greedy_params(3))
    llm.engine.abort("same")
    llm.engine.add_request("same", [1, 2], greedy_params(3))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_abort_of_nobody(llm: LLM) -> None:
    """Aborting what is not there, or not there any more, does nothing."""
    llm.engine.abort("nobody")
    generate_ids(llm, [[1, 2]], greedy_params(2))
    llm.engine.abort("llm-0")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborted_request_has_all_its_outputs(llm: LLM, steps: int) -> None:
    """Whenever a request is aborted, each of its n completions comes back, as far as it was."""
    llm.engine.add_request("gone", [1, 2, 3], SamplingParams(n=3, seed=1, max_tokens=20))
    for _ in range(steps):
        llm.engine.step()
    out = llm.engine.abort("gone")
    assert out is not None and out.finished
    assert [output.index for output in out.outputs] == [0, 1, 2]
    assert [(len(output.token_ids), output.finish_reason) for output in out.outputs] == [(steps, "abort")] * 3


@pytest.mark.parametrize("value", [0, -0.1, 1.01, True, "0.9", float("nan")])
def test_a_part_of_the_memory_is_a_fraction(history: Callable[[int], Path], value: object) -> None:
    """gpu_memory_utilization is above 0 and at most 1."""
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=.*above 0 and at most 1"):
        LLM(str(history(SEED)), gpu_memory_utilization=value)  # type: ignore[arg-type]


def test_the_size_of_the_cache_is_said_once(history: Callable[[int], Path]) -> None:
    """It goes with a GPU only, and with no other size."""
    with pytest.raises(ValueError, match=r"num_blocks and gpu_memory_utilization.*one of them"):
        LLM(str(history(SEED)), gpu_memory_utilization=0.5, num_blocks=9)
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization=0\.5 is not allowed on the device 'cpu'.*kv_cache_memory"
    ):
        LLM(str(history(SEED)), device="cpu", gpu_memory_utilization=0.5)
