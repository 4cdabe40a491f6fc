"""What a request costs does not grow with what came before it, nor with how many wait: counted, not timed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.models import VOCAB_SIZE, history_model
from helpers.scheduling import BLOCK, World
from helpers.tokenizers import f3_backend, wrap, write_tokenizer

from minipage import LLM, SamplingParams
from minipage.cache import BlockManager, Group, PrefixCache
from minipage.engine import drawing, sampled
from minipage.engine.request import Request, Status
from minipage.engine.sampler import SamplingRow
from minipage.engine.scheduler import Scheduler
from minipage.engine.speculation import NgramIndex
from minipage.text import tokenizer as tokenizers
from minipage.text.stop import StopFilter

SEED = 5
PROMPT = [1, 2, 3] * 200


@pytest.fixture
def llm(history: Callable[[int], Path]) -> LLM:
    return LLM(str(history(SEED)), device="reference", num_blocks=400, num_threads=1)


@pytest.fixture
def text_llm(tmp_path: Path) -> LLM:
    """One with a tokenizer."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", f3_backend())
    folder = history_model(tmp_path / "model", SEED, tokenizer=tokenizer, vocab_size=300)
    return LLM(str(folder), device="reference", num_blocks=400, num_threads=1)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[SamplingRow]:
    """What the sampler is given from now on."""
    seen: list[SamplingRow] = []

    def sample(logits: np.ndarray, asked: Sequence[SamplingRow]) -> Any:
        seen.extend(row._replace(output_counts=dict(row.output_counts)) for row in asked)
        return original(logits, asked)

    original = drawing.sample
    monkeypatch.setattr(drawing, "sample", sample)
    return seen


def test_penalties_do_not_read_all_tokens_for_each(llm: LLM, rows: list[SamplingRow]) -> None:
    """The sampler gets each id of the prompt and of the output once, however often it is there; the former are found once."""
    params = SamplingParams(repetition_penalty=1.01, frequency_penalty=0.01, max_tokens=100, n=2, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    assert len({id(row.prompt_ids) for row in rows}) == 1 and rows[0].prompt_ids.tolist() == [1, 2, 3]
    for completion in output.outputs:
        last = max((row for row in rows if row.child == completion.index), key=lambda row: row.position)
        assert last.output_counts == Counter(completion.token_ids[:-1])


def test_biases_and_bans_become_arrays_once(llm: LLM, rows: list[SamplingRow]) -> None:
    """Not with every token."""
    params = SamplingParams(logit_bias=dict.fromkeys(range(50), -1.0), stop_token_ids=[1], min_tokens=5, max_tokens=5)
    llm.generate(PROMPT, params, use_tqdm=False)
    assert len(rows) == 5
    assert len({id(array) for row in rows for array in row.biases}) == 2 and rows[0].biases.ids.tolist() == [*range(50)]
    assert len({id(row.banned) for row in rows}) == 1 and 1 in rows[0].banned


def test_params_of_many_prompts_are_checked_and_copied_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have thousands of entries, and there may be thousands of prompts."""
    clones: list[SamplingParams] = []
    original = SamplingParams.clone
    monkeypatch.setattr(SamplingParams, "clone", lambda self: clones.append(self) or original(self))
    shared, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    llm.generate([[1]] * 20, shared, use_tqdm=False)
    assert clones == [shared]
    outputs = llm.generate([[1]] * 5, [shared, other, shared, other, shared], use_tqdm=False)
    assert clones[1:] == [shared, other]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 1, 2, 1]


def test_those_that_wait_have_no_outputs(text_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters of stop strings, detokenizers and arrays are made for those whose turn has come, filters once for equal stops."""
    made: list[str] = []

    def count(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: made.append(name) or original(*args)

    monkeypatch.setattr(sampled, "StopFilter", count("filter", StopFilter))
    monkeypatch.setattr(sampled, "SequenceOutput", count("output", sampled.SequenceOutput))
    monkeypatch.setattr(sampled, "as_ids", count("ids", sampled.as_ids))
    monkeypatch.setattr(sampled.Biases, "of", count("biases", sampled.Biases.of))
    stops: dict[str, Any] = {"stop": ["never said", "nor this"], "stop_token_ids": [299], "min_tokens": 2}
    params = SamplingParams(n=4, max_tokens=2, ignore_eos=True, logit_bias={298: 1.0}, **stops)
    engine = text_llm.engine
    for number in range(200):
        engine.add_request(str(number), [1, 2], params)
    assert made == []
    engine.step()
    assert engine.stats().num_running == 64  # of 256 sequences
    assert Counter(made) == {"filter": 1, "output": 256, "ids": 64, "biases": 64}


def test_an_abort_does_not_search_the_queue() -> None:
    """However many wait, and wherever in the queue it is."""

    class CountingRequest(Request):
        num_comparisons = 0

        def __eq__(self, other: object) -> bool:
            CountingRequest.num_comparisons += 1
            return self is other

        __hash__ = object.__hash__

    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=1, max_num_batched_tokens=8)
    requests = [CountingRequest(str(i), None, [1], SamplingParams(), 0, 8) for i in range(300)]
    for request in requests:
        scheduler.add(request)
    for request in reversed(requests[1:]):
        scheduler.abort(request)
    assert list(scheduler.waiting) == requests[:1] and CountingRequest.num_comparisons < 2 * len(requests)


def test_a_long_prompt_that_waits_is_not_looked_up_in_each_step(
    history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only once there is room for it, however often those that run take blocks and publish them meanwhile."""
    looked_up: list[int] = []
    original = PrefixCache.match
    monkeypatch.setattr(PrefixCache, "match", lambda self, *a, **k: looked_up.append(1) or original(self, *a, **k))
    llm = LLM(str(history(SEED)), device="reference", num_blocks=100, block_size=4, num_threads=1)
    llm.generate(PROMPT[:120], SamplingParams(max_tokens=1), use_tqdm=False)
    for number in range(3):
        llm.engine.add_request(str(number), [number] * 40, SamplingParams(max_tokens=60, ignore_eos=True))
    llm.engine.step()
    llm.engine.add_request("long", PROMPT[:300], SamplingParams(max_tokens=1))
    looked_up.clear()
    for _ in range(40):
        llm.engine.step()
    assert llm.stats().num_waiting == 1 and len(looked_up) <= 2
    outputs = [output for _ in range(60) for output in llm.engine.step()]
    assert next(output for output in outputs if output.request_id == "long").num_cached_tokens > 0


def test_who_waits_comes_in_when_another_has_computed_its_beginning() -> None:
    """Nothing gets free then: what was refused has more hits, and is looked up again."""
    world = World(num_blocks=25, max_seqs=4, budget=64, caching=True, groups=(Group(), Group(BLOCK)))  # a block a step
    prompt, pick = [*range(40)], itertools.cycle([1])
    first, second = world.add(0, prompt, 1), world.add(1, prompt, 1)
    assert first is not None and second is not None
    while second.status is Status.WAITING:
        world.step(pick)
    assert first.sequences[0].num_computed == 7 * BLOCK


def test_children_share_the_ngrams_of_their_prompt(
    history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """n completions of a long prompt take it in once, not n times."""
    indices: list[NgramIndex] = []
    original = NgramIndex.__init__

    def init(self: NgramIndex, *args: Any) -> None:
        original(self, *args)
        indices.append(self)

    monkeypatch.setattr(NgramIndex, "__init__", init)
    llm = LLM(str(history(SEED)), device="reference", num_blocks=400, num_threads=1, speculative="ngram")
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 600).tolist()
    llm.generate(prompt, SamplingParams(n=8, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert llm.stats().draft_tokens
    sizes = sorted(len(index._after) for index in indices)
    assert sizes[-1] > 1000 and sizes[-2] < 20


def test_the_text_of_a_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs show the same tokens again and again, 128 of them at each position."""
    tokenizer = wrap(f3_backend())
    calls = []
    original = tokenizers.Tokenizer.decode
    monkeypatch.setattr(
        tokenizers.Tokenizer, "decode", lambda self, *a, **k: calls.append(a) or original(self, *a, **k)
    )
    texts = [tokenizer.token_text(token_id) for token_id in (97, 98, 97, 97, 98)]
    assert texts == ["a", "b", "a", "a", "b"]
    asked = len(calls)
    assert tokenizer.token_text(98) == "b" and len(calls) == asked
