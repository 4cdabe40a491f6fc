"""Ways in which sampling has been wrong elsewhere: through the whole engine, on models whose logits are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import models, ref
from helpers.checks import (
    TIGHT,
    TIGHT_MAX_TOKENS,
    TIGHT_PROMPT_LENGTH,
    Canary,
    assert_clean,
    assert_idle_and_whole,
    generate_ids,
    greedy_params,
)

from minipage import LLM, SamplingParams

Folders = Callable[[int], Path]
Oracle = Callable[[int], ref.Reference]
Canaries = Callable[[int], Canary]
Array = npt.NDArray[Any]


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens."""
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 64, **settings})


# ---- a seed is all that a sample depends on ----------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"enable_prefix_caching": False},
    "tight": {**TIGHT, "enable_prefix_caching": False},
    "tight, cached": dict(TIGHT),
    "tight, swapped": {**TIGHT, "preemption_mode": "swap", "swap_space": "1MiB"},
    "chunks of 3": {"max_num_batched_tokens": 3},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 64": {"max_num_batched_tokens": 64},
}


def tight_prompts(seed: int) -> list[list[int]]:
    """The four prompts of TIGHT."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in row] for row in rng.integers(0, models.VOCAB_SIZE, (4, TIGHT_PROMPT_LENGTH))]


def alone(folder: Path, prompts: list[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Each prompt's tokens without company."""
    with open_llm(folder, enable_prefix_caching=False) as llm:
        return [generate_ids(llm, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("name", SETTINGS)
def test_seeded_samples_survive(history: Folders, canary: Canaries, name: str) -> None:
    """A seeded request samples the same tokens preempted, in chunks, and from cached blocks."""
    prompts = tight_prompts(6)
    params = [SamplingParams(temperature=1.3, seed=1234 + i, max_tokens=TIGHT_MAX_TOKENS) for i in range(4)]
    expected = alone(history(6), prompts, params)
    assert len({tuple(tokens) for tokens in expected}) == 4
    with open_llm(history(6), **SETTINGS[name]) as llm:
        for _ in range(2):  # the second time from the prefix cache, where there is one
            assert generate_ids(llm, prompts, params) == expected
        assert ("tight" in name) == (llm.stats().preemptions > 0)
        assert ("swapped" in name) == (llm.stats().swapped_in_blocks > 0)
        assert_clean(llm, canary(6))


def test_seeds_differ(history: Folders) -> None:
    """Requests without a seed, and requests with different seeds, do not all say the same; the engine's seed repeats them."""
    prompt = models.history_prompt(6)
    found = []
    for seed in (0, 0, 1):
        with open_llm(history(6), seed=seed) as llm:
            found.append(generate_ids(llm, [prompt] * 3, SamplingParams(temperature=1.3, max_tokens=12)))
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0] + found[2]}) == 6


# ---- penalties ---------------------------------------------------------------------------------------------------------

PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {},
]


def penalised(logits: Array, prompt: Sequence[int], output: Sequence[int], penalty: dict[str, float]) -> Array:
    """Repetition by what is in prompt and output, presence and frequency by output alone."""
    logits = logits.astype(np.float64)
    seen = sorted({*prompt, *output})
    repetition = penalty.get("repetition_penalty", 1.0)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    counts = np.bincount(np.array(output, dtype=int), minlength=len(logits))
    logits -= penalty.get("frequency_penalty", 0.0) * counts
    return logits - penalty.get("presence_penalty", 0.0) * (counts > 0)


def greedy_with_penalties(
    next_logits: Callable[[list[int]], Array], prompt: list[int], num_tokens: int, penalty: dict[str, float]
) -> tuple[list[int], float]:
    """The tokens, and how close the two best came."""
    output: list[int] = []
    gap = np.inf
    for _ in range(num_tokens):
        logits = penalised(next_logits(prompt + output), prompt, output, penalty)
        best = np.sort(logits)[-2:]
        gap = min(gap, float(best[1] - best[0]))
        output.append(int(np.argmax(logits)))
    return output, gap


@pytest.mark.parametrize(("rival", "winner"), [(0.9, 0), (1.1, 3)])
def test_repetition_divides_positive_logits(tmp_path: Path, rival: float, winner: int) -> None:
    """Logit 2 of a prompt token becomes exactly 1 with penalty 2: it beats 0.9 and loses to 1.1."""
    folder = models.script_model(tmp_path, np.tile([2.0, -2.0, 0.5, rival], (4, 1)))
    with open_llm(folder) as llm:
        assert generate_ids(llm, [[0, 1]], greedy_params(1, repetition_penalty=2.0)) == [[winner]]


@pytest.mark.parametrize(("rival", "winner"), [(-4.1, 1), (-3.9, 2)])
def test_repetition_multiplies_negative_logits(tmp_path: Path, rival: float, winner: int) -> None:
    """Logit -2 of a prompt token becomes exactly -4 with penalty 2: it beats -4.1 and loses to -3.9."""
    folder = models.script_model(tmp_path, np.tile([-50.0, -2.0, rival, -50.0], (4, 1)))
    with open_llm(folder) as llm:
        assert generate_ids(llm, [[0, 1]], greedy_params(1, repetition_penalty=2.0)) == [[winner]]


def test_penalties_count_what_they_should(tmp_path: Path) -> None:
    """Side by side in one batch, each request is penalised by its own rule and none by a neighbour's."""
    row = np.array([2.0, -2.0, 0.5, 1.7, 1.31, 0.93, -0.4, 0.12])
    folder = models.script_model(tmp_path, np.tile(row, (8, 1)))
    prompt = [0, 1, 0]
    expected = [greedy_with_penalties(lambda _: row, prompt, 12, penalty)[0] for penalty in PENALTIES]
    assert len({tuple(tokens) for tokens in expected}) >= 5
    with open_llm(folder) as llm:
        found = generate_ids(llm, [prompt] * len(PENALTIES), [greedy_params(12, **penalty) for penalty in PENALTIES])
        assert found == expected
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("name", SETTINGS)
def test_penalties_survive_preemption(history: Folders, oracle: Oracle, canary: Canaries, name: str) -> None:
    """What was generated before a preemption is still output afterwards, not prompt: tokens are REF's with penalties."""
    penalty = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    model = oracle(3)
    penalties = [penalty, {}, penalty, penalty]
    cases = []
    seeds = itertools.count(30)
    while len(cases) < 4:
        prompt = tight_prompts(next(seeds))[0]
        tokens, gap = greedy_with_penalties(
            lambda ids: model.logits(ids)[-1], prompt, TIGHT_MAX_TOKENS, penalties[len(cases)]
        )
        if gap >= 0.002:
            cases.append((prompt, tokens))
    with open_llm(history(3), **SETTINGS[name]) as llm:
        params = [greedy_params(TIGHT_MAX_TOKENS, **each) for each in penalties]
        for _ in range(2):
            found = generate_ids(llm, [prompt for prompt, _ in cases], params)
            assert found == [tokens for _, tokens in cases]
        assert ("tight" in name) == (llm.stats().preemptions > 0)
        assert ("swapped" in name) == (llm.stats().swapped_in_blocks > 0)
        assert_clean(llm, canary(3))


# ---- every row its own settings ----------------------------------------------------------------------------------------

TIE = [1.0, 1.0, 0.0]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1, "seed": 1},
    {"temperature": 1.0, "top_p": 1e-6, "seed": 2},
    {"temperature": 5.0, "seed": 3},
    {"temperature": 1.0, "min_p": 0.5, "seed": 4},
    {"temperature": 1.0, "repetition_penalty": 1.7, "seed": 5},
]


@pytest.fixture(scope="module")
def tie_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose two best tokens are always exactly as likely."""
    with open_llm(models.script_model(tmp_path_factory.mktemp("tie"), np.tile(TIE, (3, 1)))) as llm:
        yield llm
        assert_idle_and_whole(llm)


def mixed_params(num_tokens: int = 10) -> list[SamplingParams]:
    """One of each kind of request."""
    return [SamplingParams(max_tokens=num_tokens, **each) for each in MIXED]


def test_every_rotation_of_a_mixed_batch(tie_llm: LLM) -> None:
    """Each row's tokens are those of its solo run whatever its place in the batch."""
    params = mixed_params()
    solo = [generate_ids(tie_llm, [[2]], each)[0] for each in params]
    for turn in range(len(params)):
        order = [(i + turn) % len(params) for i in range(len(params))]
        found = generate_ids(tie_llm, [[2]] * len(params), [params[i] for i in order])
        assert found == [solo[i] for i in order]


def test_ties_go_to_the_lowest_id(tie_llm: LLM) -> None:
    """Greedy, top_k=1 and a tiny top_p all choose the lowest of equally likely tokens; the free ones choose several."""
    found = [generate_ids(tie_llm, [[2]], each)[0] for each in mixed_params(40)]
    assert found[0] == found[1] == found[2] == [0] * 40
    assert set(found[3]) == {0, 1, 2}
    assert set(found[4]) == {0, 1}


def test_neighbours_come_and_go(tie_llm: LLM) -> None:
    """Rows keep their own settings while requests join and leave at every step."""
    params = mixed_params()
    solo = [generate_ids(tie_llm, [[2]], each)[0] for each in params]
    found: dict[str, list[int]] = {}
    for step in range(60):
        if step < 30:
            tie_llm.engine.add_request(str(step), [2], params[step % len(params)])
        for out in tie_llm.engine.step():
            found[out.request_id] = list(out.outputs[0].token_ids)
    for step in range(30):
        assert found[str(step)] == solo[step % len(params)]


# ---- what logprobs mean ------------------------------------------------------------------------------------------------

ROW = np.array([0.3, 2.1, -1.0, 0.9, 1.4, -3.0])
ALTERED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.1},
    {"temperature": 1.0},
    {"temperature": 5.0},
    {"temperature": 5.0, "top_p": 0.0001},
    {"temperature": 5.0, "top_k": 1},
    {"temperature": 1.0, "repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": {5: 50.0}},
]


@pytest.fixture(scope="module")
def row_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with the same logits, ROW, at every position."""
    with open_llm(models.script_model(tmp_path_factory.mktemp("row"), np.tile(ROW, (6, 1)))) as llm:
        yield llm
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("num_top", [0, 1, 3, 6])
@pytest.mark.parametrize("altered", ALTERED, ids=str)
def test_logprobs_are_the_models_own(row_llm: LLM, altered: dict[str, Any], num_top: int) -> None:
    """Whatever changes the choice, logprobs are the log-softmax of the model's logits, with true ranks, the chosen among them."""
    params = SamplingParams(max_tokens=8, seed=1, logprobs=num_top, prompt_logprobs=num_top, **altered)
    [out] = row_llm.generate([[0, 5, 2]], params, use_tqdm=False)
    [output] = out.outputs
    expected = ref.log_softmax(ROW)
    order = np.argsort(-ROW)
    positions = [
        *zip([5, 2], out.prompt_logprobs[1:], strict=True),
        *zip(output.token_ids, output.logprobs, strict=True),
    ]
    assert out.prompt_logprobs[0] is None
    for token_id, logprobs in positions:
        assert set(logprobs) == {*order[:num_top].tolist(), token_id}
        for i, logprob in logprobs.items():
            assert logprob.logprob == pytest.approx(expected[i], abs=1e-5)
            assert logprob.rank == order.tolist().index(i) + 1
        assert sum(np.exp(logprob.logprob) for logprob in logprobs.values()) < 1 + 1e-6
    chosen = [logprobs[token_id].logprob for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-5)


def test_no_logprobs_unless_asked(row_llm: LLM) -> None:
    """logprobs=None gives None, for prompt and output."""
    [out] = row_llm.generate([[0, 5, 2]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert out.prompt_logprobs is None
    assert out.outputs[0].logprobs is None
