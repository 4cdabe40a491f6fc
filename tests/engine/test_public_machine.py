"""Random schedules over the public API: whoever comes and goes, each request gets, bit for bit, what it gets alone.

Every combination of preemption, window and prefix cache has a state machine of its own. The number of schedules of all of
them together is MINIPAGE_SCHEDULES (2,016 by default); 50,000 take about half an hour on one core.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import models
from helpers.checks import assert_idle_and_whole, result
from helpers.pressure import Ask, Seen, Watch, assert_limits, draw_ahead, finish, poison, serve
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from minipage import LLM, BeamSearchParams, InvalidArgumentError, SamplingParams
from minipage.engine.request import Status

VOCAB = 16
EOS = 15
BLOCK_SIZES = (2, 3)


class Kind(NamedTuple):
    """What layers see."""

    windows: list[int]  #: of each layer, 0 for none
    num_blocks: st.SearchStrategy[int]  #: pools that are small for it
    options: dict[str, int]  #: keywords of LLM


KINDS = {
    "full": Kind([0], st.integers(4, 10), {}),
    "window": Kind([5], st.integers(4, 8), {}),
    "mixed": Kind([6, 0], st.integers(8, 18), {}),
    "sinks": Kind([0], st.integers(5, 10), {"sliding_window": 5, "attention_sinks": 3}),
}
MODES = ("recompute", "swap", "auto")
HOST_BLOCKS = (3, 64)


class Combination(NamedTuple):
    """What a machine is about."""

    mode: str
    kind: str
    caching: bool


NUM_COMBINATIONS = len(MODES) * len(KINDS) * 2
SCHEDULES = int(os.environ.get("MINIPAGE_SCHEDULES", "2016"))
Params = SamplingParams | BeamSearchParams


# ---- who comes ---------------------------------------------------------------------------------------------------------


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 14 tokens; most begin like others, some repeat themselves."""
    rng = np.random.default_rng(0)
    stems = [[int(t) for t in rng.integers(0, VOCAB, 14)] for _ in range(2)]
    prompts = [stem[:n] for stem in stems for n in (1, 3, 4, 6, 9)] + [stems[0][:6] + stems[1][:3], stems[0]]
    return [*prompts, stems[0][:3] * 3, stems[1][:1] * 6]


PROMPTS = make_prompts()
PARAMS: tuple[Params, ...] = (
    SamplingParams(temperature=0, max_tokens=6, logprobs=2),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.5, seed=7, max_tokens=6, logprobs=1, stop_token_ids=[3, 4]),
    SamplingParams(temperature=0.9, seed=8, max_tokens=7, min_tokens=2, top_k=5, prompt_logprobs=1),
    SamplingParams(temperature=2.0, seed=9, max_tokens=6, n=2, frequency_penalty=1.0, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=10, max_tokens=6, n=3, logprobs=0, stop_token_ids=[1, 2]),
    SamplingParams(temperature=1.0, seed=11, max_tokens=4, n=4, logit_bias={5: 3.0}),
    SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[2]),
    SamplingParams(temperature=1.3, seed=12, max_tokens=7, n=2, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=13, max_tokens=9, top_k=7, min_p=0.01, stop_token_ids=[5, 6]),
    BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=1.5),
    BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0, early_stopping=True, n=2),
    BeamSearchParams(beam_width=4, max_tokens=4, length_penalty=0.5, early_stopping="never", n=1, ignore_eos=True),
)


Arrival = tuple[int, int, str | None]  #: prompt, params, salt
ARRIVAL = st.tuples(
    st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1), st.sampled_from([None, None, "other"])
)
CANARY: Arrival = (2, 0, None)  #: fits every pool; whatever a schedule left behind, it must get what it always gets


def limited(params: Params, max_tokens: int) -> Params:
    """The same request for fewer tokens."""
    if isinstance(params, SamplingParams):
        return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
    return dataclasses.replace(params, max_tokens=max_tokens)


# ---- what each gets alone ----------------------------------------------------------------------------------------------

Alone = Callable[[str, int, int, int, int], Seen]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model by the kind of its layers."""

    @cache
    def make(kind: str) -> Path:
        windows = KINDS[kind].windows
        layers = ["sliding_attention" if size else "full_attention" for size in windows]
        return models.history_model(
            tmp_path_factory.mktemp(kind),
            3,
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=EOS,
            num_hidden_layers=len(windows),
            max_position_embeddings=64,
            sliding_window=max(windows),
            layer_types=layers,
        )

    return make


def open_llm(folder: Path, kind: str, **options: Any) -> LLM:
    """The cheapest engine for tiny models."""
    options |= KINDS[kind].options
    return LLM(str(folder), device="cpu", dtype="float32", num_threads=1, max_model_len=64, **options)


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path]) -> Iterator[Alone]:
    """What a request sees alone with at most so many tokens of output, in an engine with room for anything."""
    llms: dict[tuple[str, int], LLM] = {}

    @cache
    def run(kind: str, block_size: int, prompt: int, params: int, max_tokens: int) -> Seen:
        if (kind, block_size) not in llms:
            llms[kind, block_size] = open_llm(
                folder(kind), kind, block_size=block_size, num_blocks=64, enable_prefix_caching=False
            )
        few = limited(PARAMS[params], max_tokens)
        return serve(llms[kind, block_size], [Ask(PROMPTS[prompt], few)])[0]

    yield run
    for llm in llms.values():
        llm.close()


# ---- the machine -------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """An unfinished request: where to find what it gets alone."""

    prompt: int
    params: int
    max_tokens: int
    has_new_salt: bool  #: nobody before it had its salt, so nothing of it is cached


class Schedules(RuleBasedStateMachine):
    """Requests are added and aborted between the steps of an engine with a small pool."""

    def __init__(self, combination: Combination, folder: Path, alone: Alone, happened: Counter[str]) -> None:
        super().__init__()
        self.combination, self.folder, self.alone, self.happened = combination, folder, alone, happened
        self.names = map(str, itertools.count())
        self.asked: dict[str, Asked] = {}
        self.salts: set[str | None] = set()
        self.watch = Watch()
        self.llm: LLM | None = None
        self.ahead: list[int] = []

    @initialize(
        block_size=st.sampled_from(BLOCK_SIZES),
        data=st.data(),
        host_blocks=st.sampled_from(HOST_BLOCKS),
        max_num_seqs=st.sampled_from([4, 5, 8]),
        budget=st.sampled_from([64, 5, 2]),
        guesses=st.sampled_from([0, 0, 1, 3, 8]),
        ahead=st.booleans(),
        crowd=st.lists(ARRIVAL, min_size=2, max_size=5),
    )
    def open(
        self,
        block_size: int,
        data: st.DataObject,
        host_blocks: int,
        max_num_seqs: int,
        budget: int,
        guesses: int,
        ahead: bool,
        crowd: list[Arrival],
    ) -> None:
        mode, kind, caching = self.combination
        self.block_size = block_size
        self.llm = open_llm(
            self.folder,
            kind,
            block_size=block_size,
            num_blocks=data.draw(KINDS[kind].num_blocks),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            speculative="ngram" if guesses else None,
            num_speculative_tokens=guesses or 8,
            enable_prefix_caching=caching,
            preemption_mode=mode,
            swap_space=0 if mode == "recompute" else host_blocks * block_size * 2 * 8 * 4,
        )
        poison(self.llm)
        if ahead:
            self.ahead = draw_ahead(self.llm)
        self.add(crowd)

    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=2))
    def add(self, arrivals: list[Arrival]) -> None:
        assert self.llm is not None
        for prompt, params, salt in arrivals:
            name, token_ids = next(self.names), PROMPTS[prompt]
            try:
                request = self.llm.engine.prepare(name, token_ids, PARAMS[params], cache_salt=salt)
            except InvalidArgumentError:
                self.happened["refused"] += 1
                continue
            self.llm.engine.add_request(name, token_ids, PARAMS[params], cache_salt=salt)
            room = request.max_total_tokens - len(token_ids)
            most = min(PARAMS[params].max_tokens or room, room)
            self.asked[name] = Asked(prompt, params, most, salt not in self.salts)
            self.salts.add(salt)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        assert self.llm is not None
        for _ in range(count):
            outputs = self.llm.engine.step()
            self.watch.take(outputs)
            self.llm.check_integrity()
            assert_limits(self.llm)
            for out in outputs:
                if out.finished:
                    self.compare(out.request_id)

    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        """One that is swapped out, if there is any."""
        assert self.llm is not None
        if not self.asked:
            return
        num_swapped = self.llm.stats().num_swapped
        tracked = self.llm.engine._tracked
        swapped = [name for name in self.asked if tracked[name].request.status is Status.SWAPPED]
        names = swapped or list(self.asked)
        name = names[which % len(names)]
        out = self.llm.engine.abort(name)
        assert out is not None
        self.happened["aborted while swapped"] += num_swapped - self.llm.stats().num_swapped
        self.watch.take([out])
        self.llm.check_integrity()
        asked = self.asked.pop(name)
        if isinstance(PARAMS[asked.params], SamplingParams):
            whole = self.alone(self.combination.kind, self.block_size, asked.prompt, asked.params, asked.max_tokens)
            for output, complete in zip(out.outputs, whole.results, strict=True):
                part = result(output)
                assert part.token_ids == complete.token_ids[: len(part.token_ids)]
                assert part.logprobs == complete.logprobs[: len(part.logprobs)]

    def compare(self, name: str) -> None:
        """A finished request against itself alone."""
        asked = self.asked.pop(name)
        expected = self.alone(self.combination.kind, self.block_size, asked.prompt, asked.params, asked.max_tokens)
        assert self.watch.seen(name) == expected, (name, asked)
        assert not (asked.has_new_salt and self.watch.last[name].num_cached_tokens)
        self.happened["finished"] += 1

    def teardown(self) -> None:
        if self.llm is None:
            return
        with self.llm:
            finish(self.llm, self.watch, max_steps=2000)
            for name in list(self.asked):
                self.compare(name)
            assert_idle_and_whole(self.llm)
            self.add([CANARY])
            finish(self.llm, self.watch, max_steps=20)
            (name,) = self.asked
            self.compare(name)
            assert_idle_and_whole(self.llm)
            stats = self.llm.stats()
            self.happened["schedules"] += 1
            self.happened["preemptions"] += stats.preemptions
            self.happened["swapped"] += stats.swapped_out_blocks
            self.happened["copies"] += stats.cow_copies
            self.happened["ahead"] += len(self.ahead)
            self.happened["hits"] += stats.prefix_cache_hit_tokens
            self.happened["accepted guesses"] += stats.accepted_tokens
            self.happened["wrong guesses"] += stats.draft_tokens - stats.accepted_tokens


@pytest.fixture(scope="module")
def happened() -> Iterator[dict[str, Counter[str]]]:
    """What happened in all schedules of a mode; they prove something only if that was enough."""
    modes: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    yield modes
    for mode, counts in modes.items():
        print(f"{mode}: {dict(counts)}")
        if counts["schedules"] >= 300:
            assert counts["preemptions"] > 50
            assert counts["hits"] > 50
            assert counts["ahead"] > 50
            assert counts["copies"] > 50
            assert counts["accepted guesses"] > 50
            assert counts["wrong guesses"] > 50
            assert mode == "auto" or (counts["swapped"] > 50) == (mode == "swap")


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_schedules(
    folder: Callable[[str], Path],
    alone: Alone,
    happened: dict[str, Counter[str]],
    mode: str,
    kind: str,
    caching: bool,
) -> None:
    """Random adds, steps and aborts on small pools: each request gets what it gets alone, and the books agree."""
    combination = Combination(mode, kind, caching)
    run_state_machine_as_test(
        lambda: Schedules(combination, folder(kind), alone, happened[mode]),
        settings=settings(
            max_examples=-(-SCHEDULES // NUM_COMBINATIONS),
            stateful_step_count=8,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
