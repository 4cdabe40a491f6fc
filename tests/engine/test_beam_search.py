"""Beam search against brute force: the same hypotheses and scores, whatever the widths, penalties and ways to stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import models, ref
from helpers.beam_engine import open_llm, search
from helpers.beams import Found, all_sequences, beam_search, table_logprobs
from helpers.checks import assert_idle_and_whole
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from minipage import BeamSearchParams
from minipage.outputs import RequestOutput

CLOSE = 1e-4  #: beams that come closer than this may change places by rounding
GOLDEN = sorted((Path(__file__).parent.parent / "models" / "golden").glob("*/beams.json"))

Folders = Callable[[int], Path]


def assert_found(out: RequestOutput, expected: Sequence[Found]) -> None:
    """The outputs are the expected hypotheses, in order, and their logprobs add up."""
    assert [tuple(output.token_ids) for output in out.outputs] == [found.token_ids for found in expected]
    for index, (output, found) in enumerate(zip(out.outputs, expected, strict=True)):
        assert output.index == index
        assert output.score == pytest.approx(found.score, abs=1e-4)
        assert output.cumulative_logprob == pytest.approx(found.logprob, abs=1e-4)
        assert output.logprobs is not None
        steps = [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(steps), abs=1e-9)


@st.composite
def tables(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Random logits [V, V] of 2 to 6 tokens, flat or peaked."""
    vocab = draw(st.integers(2, 6))
    seed, scale = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.3, 1.0, 3.0]))
    return np.random.default_rng(seed).normal(0, scale, (vocab, vocab)).astype(np.float32)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    table=tables(),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 5),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    num_eos=st.integers(0, 3),
    ignore_eos=st.booleans(),
    budget=st.sampled_from([1, 2, 64]),
)
def test_equals_brute_force(
    tmp_path_factory: pytest.TempPathFactory,
    table: npt.NDArray[np.float32],
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | str,
    num_eos: int,
    ignore_eos: bool,
    budget: int,
) -> None:
    """Hypotheses, scores and their order are those of a search that knows no blocks, for any table and any parameters."""
    eos = list(range(len(table)))[-num_eos:] if num_eos else []
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    expected = beam_search(table_logprobs(table, 0), width=width, eos=[] if ignore_eos else eos, **options)
    assume(expected.gap > CLOSE)
    folder = models.script_model(tmp_path_factory.mktemp("table"), table, eos_token_id=eos or None)
    with open_llm(folder, block_size=2, num_blocks=64, max_num_batched_tokens=budget) as llm:
        out = search(llm, [1, 0], BeamSearchParams(beam_width=width, ignore_eos=ignore_eos, **options))
        assert_found(out, expected.found)
        assert_idle_and_whole(llm)


@pytest.mark.parametrize(("num_eos", "width", "length_penalty"), [(3, 2, 3.0), (4, 3, 2.0), (2, 3, -0.5)])
def test_searches_that_go_on(tmp_path: Path, num_eos: int, width: int, length_penalty: float) -> None:
    """With "never" a search goes on while anything may get better, and several EOS ids leave it W hypotheses to go on with."""
    options: dict[str, Any] = {"max_tokens": 5, "length_penalty": length_penalty, "early_stopping": "never"}
    eos = list(range(8 - num_eos, 8))
    for seed in range(40):
        table = np.random.default_rng(seed).normal(0, 1.5, (8, 8)).astype(np.float32)
        table[:, eos] += 1
        expected = beam_search(table_logprobs(table, 0), width=width, eos=eos, **options)
        if expected.gap > CLOSE:
            with open_llm(models.script_model(tmp_path / str(seed), table, eos_token_id=eos)) as llm:
                assert_found(search(llm, [0], BeamSearchParams(beam_width=width, **options)), expected.found)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("vocab", "max_tokens"), [(2, 6), (3, 4), (5, 3)])
def test_widest_beam_finds_the_best_of_all(tmp_path: Path, vocab: int, max_tokens: int, length_penalty: float) -> None:
    """A beam with room for every sequence finds the best of all sequences, in order."""
    for seed in range(3):
        table = np.random.default_rng(seed).normal(0, 1, (vocab, vocab)).astype(np.float32)
        eos = [vocab - 1] if seed else []
        every = all_sequences(table_logprobs(table, 0), vocab, max_tokens, length_penalty, eos)
        with open_llm(models.script_model(tmp_path / str(seed), table, eos_token_id=eos or None)) as llm:
            params = BeamSearchParams(beam_width=128, max_tokens=max_tokens, length_penalty=length_penalty)
            outputs = search(llm, [0], params).outputs
        assert [output.score for output in outputs] == pytest.approx([found.score for found in every], abs=1e-4)
        assert {tuple(output.token_ids) for output in outputs} == {found.token_ids for found in every}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ref.Reference]:
    """A model of seven tokens in which every past token matters, and its oracle."""
    folder = models.history_model(tmp_path_factory.mktemp("small"), 11, vocab_size=7, eos_token_id=6)
    return folder, ref.Reference(folder)


def history_logprobs(model: ref.Reference, prompt: Sequence[int]) -> Callable[[tuple[int, ...]], Any]:
    """What REF says follows a prompt and some generated tokens."""
    return lambda tokens: ref.log_softmax(model.logits([*prompt, *tokens])[-1])


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("length_penalty", [0.5, 2.0])
def test_beams_keep_their_own_past(
    small: tuple[Path, ref.Reference], width: int, length_penalty: float, block_size: int
) -> None:
    """Where every past token matters, beams that fork, share and copy blocks find what recomputing everything finds."""
    folder, model = small
    rng = np.random.default_rng(width)
    compared = 0
    with open_llm(folder, block_size=block_size) as llm:
        while compared < 3:
            prompt = [int(t) for t in rng.integers(0, 6, rng.integers(1, 11))]
            options: dict[str, Any] = {"max_tokens": 9, "length_penalty": length_penalty, "early_stopping": "never"}
            expected = beam_search(history_logprobs(model, prompt), width=width, eos=[6], **options)
            if expected.gap > 1e-3:
                assert_found(search(llm, prompt, BeamSearchParams(beam_width=width, **options)), expected.found)
                compared += 1
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("prompt", [[0], [1, 2, 3] * 6 + [1, 0]], ids=["1 token", "20 tokens"])
def test_prompt_is_not_in_the_score(tmp_path: Path, prompt: list[int]) -> None:
    """Scores count generated tokens alone, an EOS among them: known numbers, whatever the length of the prompt."""
    table = np.log(np.random.default_rng(7).dirichlet(0.7 * np.ones(5), size=5))
    with open_llm(models.script_model(tmp_path / "model", table, eos_token_id=4)) as llm:

        def best(width: int, length_penalty: float, early: bool | str = False) -> list[tuple[list[int], float]]:
            params = BeamSearchParams(
                beam_width=width, max_tokens=3, length_penalty=length_penalty, early_stopping=early
            )
            outputs = search(llm, prompt, params).outputs
            return [(output.token_ids, round(float(output.score or 0), 4)) for output in outputs]

        assert best(1, 1.0, "never") == [([1, 3, 4], -0.4515)]
        assert best(1, 1.0) == [([4], -0.9471)]  # what is alive does not look better at the same length
        for width in (2, 4):
            expected = [([1, 3, 4], -0.4515), ([0, 1, 3], -0.9411), ([4], -0.9471)]
            assert best(width, 1.0)[:3] == expected[:width]
            assert best(width, 0.0)[:2] == [([4], -0.9471), ([1, 3, 4], -1.3544)]
        assert best(2, 2.0)[0][0] == [1, 3, 4]  # as the EOS counts; without it [0, 1, 3] would win


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.parent.name)
def test_equals_transformers(tmp_path: Path, file: Path) -> None:
    """Hypotheses, scores and order are those of transformers' generate (scripts/make_golden.py)."""
    golden = json.loads(file.read_text())
    for each in file.parent.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    models.edit_json(tmp_path / "config.json", {"eos_token_id": golden["eos"]})
    with open_llm(tmp_path) as llm:
        for prompt, width, length_penalty, early_stopping, expected in golden["searches"]:
            params = BeamSearchParams(
                beam_width=width, max_tokens=8, length_penalty=length_penalty, early_stopping=early_stopping
            )
            outputs = search(llm, prompt, params).outputs
            assert [output.token_ids for output in outputs] == [token_ids for token_ids, _ in expected]
            assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_there_are_golden_searches() -> None:
    """The golden files are in the tree, so that the test above does not pass by having nothing to do."""
    assert len(GOLDEN) == 3


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("length", [3, 4, 7])
def test_copies_only_where_two_beams_write_the_same_block(
    small: tuple[Path, ref.Reference], length: int, block_size: int
) -> None:
    """A block is copied once for each further beam that goes on from it inside a block, and never at a block's end."""
    folder, model = small
    rng = np.random.default_rng(length)
    options: dict[str, Any] = {"max_tokens": 7, "length_penalty": 1.0, "early_stopping": "never"}
    while True:
        prompt = [int(t) for t in rng.integers(0, 6, length)]
        expected = beam_search(history_logprobs(model, prompt), width=4, **options)
        if expected.gap > 1e-3:
            break
    copies = 0
    for step, siblings in enumerate(expected.siblings[:-1]):
        if (length + step) % block_size:
            copies += sum(count - 1 for count in siblings)
    assert any(count > 1 for siblings in expected.siblings for count in siblings)
    with open_llm(folder, block_size=block_size) as llm:
        params = BeamSearchParams(beam_width=4, ignore_eos=True, **options)
        assert_found(search(llm, prompt, params), expected.found)
        assert llm.stats().cow_copies == copies


def test_windows_of_beams(history: Folders) -> None:
    """Beams over a rolling cache find what they find in a cache that keeps all."""
    model = ref.Reference(history(10))
    rng = np.random.default_rng(0)
    compared = 0
    with open_llm(history(10), sliding_window=8) as llm:
        while compared < 4:
            prompt = [int(t) for t in rng.integers(0, models.VOCAB_SIZE, (5, 8, 9, 20)[compared])]
            expected = beam_search(
                lambda tokens, prompt=prompt: ref.log_softmax(model.logits([*prompt, *tokens], 8)[-1]),
                width=3,
                max_tokens=14,
            )
            if expected.gap > 5e-4:
                assert_found(search(llm, prompt, BeamSearchParams(beam_width=3, max_tokens=14)), expected.found)
                compared += 1
        assert_idle_and_whole(llm)
