"""Speculation by prompt lookup changes how many steps an output takes, and no bit of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import models
from helpers.checks import assert_idle_and_whole, greedy_params, run_to_end
from helpers.pressure import Ask, byte_model, poison, serve
from helpers.talker import talker

from minipage import LLM, BeamSearchParams, InvalidArgumentError, SamplingParams
from minipage.engine.runner import Runner

VOCAB = 16
EOS = 15


# ---- what comes out ----------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What an engine is under, and the layers of its model."""

    windows: tuple[int, ...] = (0, 0)
    options: Mapping[str, Any] = MappingProxyType({})


TIGHT = {"block_size": 3, "num_blocks": 18, "max_num_seqs": 8}
SETTINGS = {
    "roomy": Setting(options={"num_blocks": 200, "block_size": 3}),
    "uncached": Setting(options={"num_blocks": 200, "block_size": 3, "enable_prefix_caching": False}),
    "recompute": Setting(options=TIGHT),
    "swap": Setting(options={**TIGHT, "preemption_mode": "swap", "swap_space": "1MiB"}),
    "chunks": Setting(options={**TIGHT, "max_num_batched_tokens": 5}),
    "window": Setting((5, 5), TIGHT),
    "mixed": Setting((6, 0), {**TIGHT, "num_blocks": 36, "preemption_mode": "swap", "swap_space": "1MiB"}),
    "sinks": Setting(options={**TIGHT, "sliding_window": 7, "attention_sinks": 3}),
}


def make_asks() -> list[Ask]:
    """Requests of every kind whose prompts repeat themselves."""
    rng = np.random.default_rng(1)
    stems = [[int(i) for i in rng.integers(0, VOCAB - 1, n)] for n in (3, 4, 5)]
    prompts = [stems[0] * 3, stems[1] * 2 + stems[1][:2], stems[2] * 2, [stems[0][0]] * 7]
    params: list[SamplingParams | BeamSearchParams] = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=24, logit_bias={stems[0][0]: 4.0}, prompt_logprobs=1),
        SamplingParams(temperature=0.7, seed=1, max_tokens=24, logprobs=1, min_tokens=12, logit_bias={EOS: 2.0}),
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=0.8, frequency_penalty=-0.5, logprobs=0),
        SamplingParams(temperature=0.5, seed=2, n=3, max_tokens=16, top_k=4, logprobs=1),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=18, presence_penalty=-1.0, stop_token_ids=[2]),
        BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=1.0),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0.4, seed=4, max_tokens=None, top_p=0.9, logprobs=1, ignore_eos=True),
    ]
    return [Ask(prompts[i % len(prompts)], each) for i, each in enumerate(params)]


ASKS = make_asks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, ...]], Path]:
    """A small model in which every token matters, with the windows of its layers."""

    def make(windows: tuple[int, ...]) -> Path:
        return models.history_model(
            tmp_path_factory.mktemp("model"),
            3,
            vocab_size=VOCAB,
            eos_token_id=EOS,
            sliding_window=max(windows),
            layer_types=["sliding_attention" if size else "full_attention" for size in windows],
        )

    return make


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine with NaN in all its pages."""
    llm = LLM(str(folder), **{"device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 48, **options})
    poison(llm)
    return llm


@pytest.mark.parametrize("debug", ["0", "1"], ids=["plain", "debug"])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_without(
    folder: Callable[[tuple[int, ...]], Path], monkeypatch: pytest.MonkeyPatch, name: str, debug: str
) -> None:
    """Tokens, text, logprobs, streams and reasons are bit for bit those of an engine that guesses nothing and has room for all,
    whatever the most tokens guessed, with what is right and what is wrong in drafts, and whoever has to give way.
    """
    monkeypatch.setenv("MINIPAGE_DEBUG", debug)
    windows, options = SETTINGS[name]
    path = folder(windows)
    alike = {key: options[key] for key in ("sliding_window", "attention_sinks") if key in options}
    with open_llm(path, num_blocks=400, block_size=3, enable_prefix_caching=False, **alike) as llm:
        expected = [serve(llm, [ask])[0] for ask in ASKS]
        assert llm.stats().draft_tokens == 0
    preemptions = 0
    for most in (1, 3, 8):
        with open_llm(path, speculative="ngram", num_speculative_tokens=most, **options) as llm:
            assert serve(llm, ASKS) == expected
            assert serve(llm, ASKS[::-1]) == expected[::-1]  # some of it from the prefix cache
            stats = llm.stats()
            assert 0 < stats.accepted_tokens < stats.draft_tokens
            preemptions += stats.preemptions
            assert_idle_and_whole(llm)
    assert preemptions > 0 or name not in ("recompute", "swap", "chunks", "mixed")


def test_stop_strings_and_broken_characters(tmp_path: Path) -> None:
    """Text that ends within an accepted draft ends where it would, and half characters wait as they would."""
    asks = [
        Ask(list(b"aXYXYXYX"), SamplingParams(temperature=t, seed=seed, max_tokens=40, stop=stop, ignore_eos=True))
        for t, seed in ((0, 0), (0.3, 1), (0.5, 2), (0.5, 3))
        for stop in (None, ["a"], ["\ufffd\ufffd"])
    ]
    path = byte_model(tmp_path, 5)
    with open_llm(path, num_blocks=100, max_model_len=64) as llm:
        expected = serve(llm, asks)
    with open_llm(path, num_blocks=100, max_model_len=64, speculative="ngram") as llm:
        assert serve(llm, asks) == expected
        assert 0 < llm.stats().accepted_tokens < llm.stats().draft_tokens


@pytest.mark.parametrize("stop", ["yx", "xyxyx", "yxy"])
def test_a_stop_string_in_the_middle_of_a_draft(tmp_path: Path, stop: str) -> None:
    """Tokens behind the end are not there, though they were computed; the stream has nothing of the stop string."""
    results = []
    for speculative in (None, "ngram"):
        with open_llm(talker(tmp_path), num_blocks=64, speculative=speculative) as llm:
            streamed = [
                out.outputs[0] for out in llm.stream("xyxyxy~", SamplingParams(temperature=0, stop=stop, max_tokens=20))
            ]
            last = streamed[-1]
            assert "".join(output.delta_text for output in streamed) == last.text
            results.append((last.token_ids, last.text, last.finish_reason, last.stop_reason))
    assert results[0] == results[1]
    assert results[0][2:] == ("stop", stop)


def test_penalties_count_the_tokens_of_a_draft(tmp_path: Path) -> None:
    """A token behind accepted guesses is drawn as if they had been drawn one by one: a pattern breaks off where it would."""
    params = greedy_params(60, frequency_penalty=1.5)
    with open_llm(talker(tmp_path), num_blocks=64, max_model_len=200) as llm:
        [expected] = llm.generate("~", params)
    with open_llm(talker(tmp_path), num_blocks=64, max_model_len=200, speculative="ngram") as llm:
        assert llm.generate("~", params)[0].outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.stats().accepted_tokens > 15
    assert expected.outputs[0].text.startswith("xy" * 13) and not expected.outputs[0].text.startswith("xy" * 20)


# ---- what it costs and saves -------------------------------------------------------------------------------------------


def count_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call for logits from now on."""
    counts: list[int] = []
    logits = Runner.logits

    def counted(self: Runner, rows: list[int]) -> np.ndarray:
        counts.append(len(rows))
        assert len(rows) <= self.max_logit_rows
        return logits(self, rows)

    monkeypatch.setattr(Runner, "logits", counted)
    return counts


def count_steps(llm: LLM, prompt: Sequence[int], params: Any) -> int:
    """Steps until a request is finished."""
    llm.engine.add_request("x", list(prompt), params)
    steps = 0
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        steps += 1
    return steps


def test_steps_are_saved(tmp_path: Path) -> None:
    """Text of period two costs a step for nine tokens once the pattern is seen; off, a step a token."""
    path = talker(tmp_path)
    with open_llm(path, num_blocks=64, max_model_len=200) as llm:
        assert count_steps(llm, b"~", greedy_params(101)) == 101
    with open_llm(path, num_blocks=64, max_model_len=200, speculative="ngram") as llm:
        assert count_steps(llm, b"~", greedy_params(101)) < 20
        assert llm.stats().accepted_tokens > 80


@pytest.mark.parametrize("most", [1, 8])
def test_one_seat_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The logits of a draft are had in one call, though as many sequences as seats never need as many rows."""
    options = {"num_blocks": 64, "max_model_len": 200, "max_num_seqs": 1}
    with open_llm(talker(tmp_path), speculative="ngram", num_speculative_tokens=most, **options) as llm:
        counts = count_rows(llm, monkeypatch)
        steps = count_steps(llm, b"~", greedy_params(101))
        assert len(counts) == steps
        assert max(counts) == 1 + most


def test_logits_of_many_drafts_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seats with eight guesses each have more rows than a call takes; nobody's are torn apart."""
    with open_llm(talker(tmp_path), num_blocks=64, max_num_seqs=2, speculative="ngram") as llm:
        counts = count_rows(llm, monkeypatch)
        for name in "ab":
            llm.engine.add_request(name, list(b"xyxyxyxyxy"), greedy_params(30))
        done = run_to_end(llm)
        assert [bytes(done[name].outputs[0].token_ids) for name in "ab"] == [b"xy" * 15] * 2
        assert max(counts) == 9


def test_children_share_the_logits_of_their_prompt(
    folder: Callable[[tuple[int, ...]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens of n children are drawn from one row of logits, computed once."""
    with open_llm(folder((0, 0)), num_blocks=64) as llm:
        counts = count_rows(llm, monkeypatch)
        llm.engine.add_request("x", [1, 2, 3], SamplingParams(n=8, seed=1, max_tokens=2, ignore_eos=True))
        run_to_end(llm)
        assert counts == [1, 8]


def test_what_is_cached_is_what_would_be(folder: Callable[[tuple[int, ...]], Path]) -> None:
    """After the same requests, drafted or not, the same beginnings are found in the prefix cache."""
    found = []
    path = folder((0, 0))
    for speculative in (None, "ngram"):
        with open_llm(path, num_blocks=200, block_size=2, speculative=speculative) as llm:
            for ask in ASKS:
                serve(llm, [ask])
            prefixes = llm.engine._scheduler.blocks.prefixes
            assert prefixes is not None
            found.append(sorted((p.num_blocks, p.key) for p in prefixes._prefixes.values()))
            assert (llm.stats().accepted_tokens > 0) == (speculative is not None)
    assert found[0] == found[1]


def test_beams_do_not_draft(folder: Callable[[tuple[int, ...]], Path]) -> None:
    """A beam search has nothing to verify a guess with."""
    with open_llm(folder((0, 0)), num_blocks=64, speculative="ngram") as llm:
        llm.beam_search([[1, 2] * 4], BeamSearchParams(beam_width=3, max_tokens=8), use_tqdm=False)
        assert llm.stats().draft_tokens == 0


def test_a_failed_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step with drafts fails, before or while they are verified, every block is free again, and the engine goes on."""
    with open_llm(talker(tmp_path), num_blocks=64, speculative="ngram") as llm:
        for name in ("execute", "logits"):
            llm.engine.add_request("x", list(b"xyxyxyxyxy"), greedy_params(30))
            llm.engine.step()
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):

                def fail(*args: object) -> None:
                    raise RuntimeError("broken")

                patch.setattr(Runner, name, fail)
                llm.engine.step()
            assert_idle_and_whole(llm)
        [out] = llm.generate("~", greedy_params(6), use_tqdm=False)
        assert out.outputs[0].text == "xyxyxy"


# ---- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": "eagle"},
        {"speculative": True},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 9},
        {"num_speculative_tokens": 2.0},
        {"num_speculative_tokens": None},
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any]) -> None:
    """The keyword, its value and what is allowed; before the model is looked for."""
    [(name, value)] = options.items()
    with pytest.raises(InvalidArgumentError, match=rf"{name}={value!r} is not allowed; it must be") as error:
        LLM("/nowhere", **options)
    assert ("'ngram'" if name == "speculative" else "1 to 8") in str(error.value)
