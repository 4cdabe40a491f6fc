"""Beam searches as requests of an engine: what they hold, beside whom they run, when they end, and what a caller sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import models, ref
from helpers.beam_engine import open_llm, search
from helpers.checks import Canary, assert_clean
from helpers.pressure import Ask, Watch, finish, serve

from minipage import LLM, BeamSearchParams, InvalidArgumentError

Folders = Callable[[int], Path]


@pytest.fixture(scope="module")
def llm(history: Folders, canary: Callable[[int], Canary]) -> Iterator[LLM]:
    """An engine that is still clean when the module ends."""
    with open_llm(history(10), enable_prefix_caching=False) as llm:
        yield llm
        assert_clean(llm, canary(10))


def test_beams_share_blocks(llm: LLM) -> None:
    """While a search runs, its beams name the same blocks of the prompt: they are there once."""
    llm.engine.add_request("beams", models.history_prompt(10, 17), BeamSearchParams(beam_width=4, max_tokens=6))
    for _ in range(4):
        llm.engine.step()
    stats = llm.stats()
    assert stats.shared_block_savings >= 3 * (17 // 4)
    assert stats.num_blocks - stats.num_free_blocks <= 17 // 4 + 4 * 2
    finish(llm, Watch())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_best(llm: LLM, n: int) -> None:
    """n of beam_width hypotheses are the first n of all."""
    prompt = models.history_prompt(10)
    every = search(llm, prompt, BeamSearchParams(beam_width=3, max_tokens=6)).outputs
    some = search(llm, prompt, BeamSearchParams(beam_width=3, max_tokens=6, n=n)).outputs
    assert len(every) == 3
    assert some == every[:n]


def test_one_beam_is_greedy(llm: LLM) -> None:
    """A beam of one follows the most likely token."""
    prompt = models.history_prompt(10)
    [output] = search(llm, prompt, BeamSearchParams(beam_width=1, max_tokens=12)).outputs
    assert output.token_ids == ref.greedy(ref.Reference(llm.info.path), prompt, 12)
    assert output.finish_reason == "length"


def test_outputs_come_once_at_the_end(llm: LLM) -> None:
    """Stepping and streaming give nothing until the search has ended, and then its result once."""
    prompt, params = models.history_prompt(10), BeamSearchParams(beam_width=3, max_tokens=5)
    expected = search(llm, prompt, params)
    llm.engine.add_request("beams", prompt, params)
    steps = [llm.engine.step() for _ in range(5)]
    assert steps[:-1] == [[]] * 4
    assert [out.finished for out in steps[-1]] == [True]
    assert steps[-1][0].outputs == expected.outputs
    assert not llm.engine.has_unfinished_requests()
    streamed = list(llm.stream(prompt, params))
    assert [out.outputs for out in streamed] == [expected.outputs]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_budget_smaller_than_the_beam(history: Folders, llm: LLM, budget: int) -> None:
    """Beams that need several steps for one token each, beside other requests, find the same."""
    prompt = models.history_prompt(10)
    asks = [
        Ask(prompt, BeamSearchParams(beam_width=4, max_tokens=6)),
        Ask(prompt[:5], BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.0)),
    ]
    alone = [serve(llm, [ask])[0] for ask in asks]
    with open_llm(history(10), max_num_batched_tokens=budget) as tight:
        assert serve(tight, asks) == alone


def test_aborted_in_the_middle(llm: LLM) -> None:
    """A search that is aborted gives its blocks back at once; its mate goes on as if alone."""
    prompt, params = models.history_prompt(10), BeamSearchParams(beam_width=4, max_tokens=8)
    [alone] = serve(llm, [Ask(prompt, params)])
    for steps in range(6):
        watch = Watch()
        llm.engine.add_request("aborted", prompt[:9], params)
        llm.engine.add_request("kept", prompt, params)
        for _ in range(steps):
            watch.take(llm.engine.step())
        out = llm.engine.abort("aborted")
        assert out is not None and out.finished
        assert [output.finish_reason for output in out.outputs] == ["abort"]
        llm.check_integrity()
        finish(llm, watch)
        assert watch.seen("kept") == alone


def test_seats_are_kept(tmp_path: Path) -> None:
    """A search that has few hypotheses for a moment keeps the seats that it needs later."""
    table = np.random.default_rng(0).normal(0, 0.3, (3, 3))
    with open_llm(models.script_model(tmp_path / "model", table), max_num_seqs=4) as llm:
        llm.engine.add_request("beams", [0], BeamSearchParams(beam_width=4, max_tokens=5))
        llm.engine.add_request("other", [1], BeamSearchParams(beam_width=1, max_tokens=2))
        llm.engine.step()
        assert len(llm.engine._scheduler.running[0].unfinished) == 3
        finish(llm, Watch())
        with pytest.raises(InvalidArgumentError, match="beam_width=5"):
            llm.engine.add_request("wide", [0], BeamSearchParams(beam_width=5))


@pytest.mark.parametrize("room", ["max_model_len", "num_blocks"])
def test_ends_with_what_fits(history: Folders, llm: LLM, room: str) -> None:
    """A search that the model's length or the pool cuts short is that of as many tokens, and says so."""
    prompt = models.history_prompt(10, 5)
    # Three blocks are one that both beams share and one more for each, eight slots; the ninth token needs none.
    options = {"max_model_len": 9} if room == "max_model_len" else {"num_blocks": 3}
    [expected] = serve(llm, [Ask(prompt, BeamSearchParams(beam_width=2, max_tokens=4, early_stopping="never"))])
    with open_llm(history(10), **options) as tight:
        params = BeamSearchParams(beam_width=2, max_tokens=100, early_stopping="never")
        assert serve(tight, [Ask(prompt, params)]) == [expected]
    assert {each.finish_reason for each in expected.results} == {"length"}


def test_logits_of_no_use(tmp_path: Path, canary: Callable[[int], Canary]) -> None:
    """A search that meets NaN ends with an error of its own; its mate finds what it finds alone."""
    tensors = models.history_tensors(10)
    tensors["model.embed_tokens.weight"][1] = np.nan
    folder = models.write_folder(tmp_path / "poison", models.HISTORY_CONFIG, tensors)
    prompt = [token for token in models.history_prompt(10) if token != 1]
    params = BeamSearchParams(beam_width=3, max_tokens=2)
    with open_llm(folder, num_blocks=24) as llm:
        [alone] = serve(llm, [Ask(prompt, params)])
        llm.engine.add_request("ill", [*prompt, 1, *prompt], params)
        llm.engine.add_request("well", prompt, params)
        watch = Watch()
        finish(llm, watch)
        [output] = watch.last["ill"].outputs
        assert (output.finish_reason, output.token_ids) == ("abort", [])
        assert "nan" in str(output.stop_reason).lower()
        assert watch.seen("well") == alone
        assert_clean(llm, canary(10))
