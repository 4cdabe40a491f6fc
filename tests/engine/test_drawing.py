"""Tokens drawn by the device, in the same steps as those drawn on the host: on the reference device, whose ops are NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models
from helpers.checks import assert_idle_and_whole, greedy_params, run_to_end

from minipage import LLM, BeamSearchParams, SamplingParams
from minipage.device.cpu import ReferenceDevice
from minipage.engine import batch_buffers
from minipage.engine.batch_buffers import Mirror
from minipage.engine.runner import Runner
from minipage.engine.step import Step
from minipage.kernels import reference

SEED = 10
PROMPT = models.history_prompt(SEED, 9)


def open_llm(folder: Path, device: str, **options: Any) -> LLM:
    """A small engine."""
    settings = {"dtype": "float32", "block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 16} | options
    return LLM(str(folder), device=device, **settings)


def sampled(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=8, ignore_eos=True, **options)


PLAIN = [
    greedy_params(8),
    sampled(1),
    sampled(2, top_k=1, temperature=3.0),
    sampled(-3, top_k=20, top_p=0.9, temperature=1.7),
    sampled(4, min_p=0.2, temperature=1e-300),
    sampled(5, top_p=0.5, temperature=4.0),
]
#: What wants more than a token of its logits, each for another reason.
OTHERS = [
    sampled(6, logprobs=2),
    sampled(7, repetition_penalty=1.3),
    sampled(8, presence_penalty=0.5),
    sampled(9, logit_bias={3: 4.0}),
    SamplingParams(seed=10, max_tokens=8, min_tokens=4, stop_token_ids=[7]),
    sampled(11, n=3, temperature=2.0),
    sampled(12, prompt_logprobs=1),
    BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True),
]


class Traffic:
    """Rows of logits that were computed, drawn from by the device, and read by the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed = self.drawn = self.read = 0
        compute, read, execute_next = Runner.compute_logits, Runner.read_logits, Runner.execute_next

        def counted(runner: Runner, rows: list[int], draws: np.ndarray | None = None) -> Callable[[], list[int]]:
            self.computed += len(rows)
            self.drawn += 0 if draws is None else len(draws)
            return compute(runner, rows, draws)

        def counted_next(runner: Runner, step: Step, draws: np.ndarray) -> Callable[[], list[int]]:
            self.computed += len(draws)
            self.drawn += len(draws)
            return execute_next(runner, step, draws)

        def counted_read(runner: Runner, start: int, stop: int) -> np.ndarray:
            self.read += stop - start
            return read(runner, start, stop)

        monkeypatch.setattr(Runner, "compute_logits", counted)
        monkeypatch.setattr(Runner, "read_logits", counted_read)
        monkeypatch.setattr(Runner, "execute_next", counted_next)


def serve(llm: LLM, all_params: list[Any]) -> list[Any]:
    """The tokens of all completions of requests that run together."""
    for index, params in enumerate(all_params):
        llm.engine.add_request(str(index), PROMPT[: 2 + index % 7], params)
    done = run_to_end(llm)
    assert_idle_and_whole(llm)
    return [[list(one.token_ids) for one in done[str(i)].outputs] for i in range(len(all_params))]


@pytest.mark.parametrize("options", [{}, {"speculative": "ngram"}], ids=["plain", "speculative"])
def test_a_mixed_crowd_gets_what_the_host_draws(history: Callable[[int], Path], options: dict[str, Any]) -> None:
    """Whoever draws, and whatever else is in the step, the tokens are those of a device that draws none."""
    crowd = [params for pair in zip(OTHERS, [*PLAIN, *PLAIN], strict=False) for params in pair]
    with open_llm(history(SEED), "cpu", **options) as llm:
        expected = serve(llm, crowd)
    with open_llm(history(SEED), "reference", **options) as llm:
        assert serve(llm, crowd) == expected
        assert serve(llm, crowd[::-1]) == serve_alone(llm, crowd[::-1])


def test_ops_that_run_when_they_are_recorded_change_no_token(
    history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU runs ops once before it captures them, and then again: a step from drawn tokens must begin with the same ones."""
    with open_llm(history(SEED), "reference") as llm:
        expected = serve(llm, PLAIN)

    def record(device: ReferenceDevice, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function

    monkeypatch.setattr(ReferenceDevice, "record", record)
    with open_llm(history(SEED), "reference") as llm:
        assert serve(llm, PLAIN) == expected


class Apart(Mirror):
    """The device has bytes of its own, as a GPU has."""

    def __init__(self, device: Any, num_bytes: int) -> None:
        super().__init__(device, num_bytes)
        self._device[:] = 99
        self._host = np.full(num_bytes, 77, np.uint8)


def test_a_device_with_memory_of_its_own_is_sent_what_it_reads(
    history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps ahead and others: where something of a batch, or of how to draw, did not arrive, tokens would differ."""
    crowd = [*PLAIN, *OTHERS[:2], *PLAIN[::-1]]
    with open_llm(history(SEED), "cpu") as llm:
        expected = [serve(llm, PLAIN), serve(llm, crowd)]
    monkeypatch.setattr(batch_buffers, "Mirror", Apart)
    with open_llm(history(SEED), "reference") as llm:
        assert [serve(llm, PLAIN), serve(llm, crowd)] == expected


def serve_alone(llm: LLM, all_params: list[Any]) -> list[Any]:
    """The same requests one after the other."""
    said = []
    for index, params in enumerate(all_params):
        llm.engine.add_request("alone", PROMPT[: 2 + index % 7], params)
        said.append([list(one.token_ids) for one in run_to_end(llm)["alone"].outputs])
    return said


def test_plain_rows_do_not_come_to_the_host(history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temperature and filters are all, the device draws each token and no logits are read."""
    with open_llm(history(SEED), "reference") as llm:
        traffic = Traffic(monkeypatch)
        serve(llm, PLAIN)
    assert traffic.computed == traffic.drawn == 8 * len(PLAIN)
    assert traffic.read == 0


@pytest.mark.parametrize(
    "params", OTHERS[:5] + OTHERS[7:], ids=["logprobs", "repetition", "presence", "bias", "bans", "beams"]
)
def test_others_are_read_alone(history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    """What needs logits reads its own rows and leaves those of its mates on the device."""
    with open_llm(history(SEED), "reference") as llm:
        traffic = Traffic(monkeypatch)
        serve(llm, [PLAIN[0], params, PLAIN[1]])
    assert traffic.drawn >= 16
    assert 0 < traffic.read == traffic.computed - traffic.drawn


def test_samples_are_drawn_by_the_device_once_there_are_n(
    history: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens of n samples come from one row that is read, all others from the device."""
    with open_llm(history(SEED), "reference") as llm:
        traffic = Traffic(monkeypatch)
        serve(llm, [sampled(11, n=3)])
    assert (traffic.read, traffic.drawn) == (1, 3 * 7)


def test_a_row_without_a_token_is_read_to_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose logits are NaN ends with the host's error, and its mate does not notice."""
    tensors = models.history_tensors(SEED)
    tensors["model.embed_tokens.weight"][1] = np.nan
    folder = models.write_folder(tmp_path, models.HISTORY_CONFIG, tensors)
    said = {}
    for device in ("cpu", "reference"):
        with open_llm(folder, device) as llm:
            llm.engine.add_request("bad", [1, 2, 3], greedy_params(4))
            llm.engine.add_request("good", [2, 3, 4], greedy_params(4))
            traffic = Traffic(monkeypatch)
            said[device] = run_to_end(llm)
            monkeypatch.undo()
            assert_idle_and_whole(llm)
    assert traffic.read == 1
    bad = [said[device]["bad"].outputs[0] for device in said]
    assert [one.finish_reason for one in bad] == ["abort"] * 2
    assert bad[0].stop_reason == bad[1].stop_reason
    assert "nan" in str(bad[0].stop_reason)
    assert said["cpu"]["good"].outputs[0].token_ids == said["reference"]["good"].outputs[0].token_ids


def test_no_token_goes_ahead_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be drawn amid steps that go ahead, ops get only ids of the vocabulary, the request ends with an error,
    and its mate goes on."""
    tensors = models.history_tensors(SEED)
    token_ids = greedy_alone(models.write_folder(tmp_path / "whole", models.HISTORY_CONFIG, tensors), PROMPT)
    late = next(token for i, token in enumerate(token_ids) if 2 < i < 9 and token not in [*PROMPT, *token_ids[:i]])
    tensors["model.embed_tokens.weight"][late] = np.nan
    folder = models.write_folder(tmp_path / "broken", models.HISTORY_CONFIG, tensors)
    mate = next(p for p in ([i, i + 1] for i in range(50)) if late not in p and late not in greedy_alone(folder, p))
    embed, least = reference.embed, []

    def noted(out: np.ndarray, weight: Any, ids: np.ndarray) -> None:
        least.append(int(ids.min()))
        embed(out, weight, ids)

    monkeypatch.setattr(reference, "embed", noted)
    with open_llm(folder, "reference") as llm:
        llm.engine.add_request("bad", PROMPT, greedy_params(12))
        llm.engine.add_request("good", mate, greedy_params(12))
        done = run_to_end(llm)
        assert_idle_and_whole(llm)
    bad, good = done["bad"].outputs[0], done["good"].outputs[0]
    assert list(bad.token_ids) == token_ids[: token_ids.index(late) + 1]
    assert bad.finish_reason == "abort" and "one is nan or inf, or all are -inf" in str(bad.stop_reason)
    assert list(good.token_ids) == greedy_alone(folder, mate)
    assert min(least) >= 0


def greedy_alone(folder: Path, prompt: list[int]) -> list[int]:
    """What the host draws."""
    with open_llm(folder, "cpu") as llm:
        [output] = llm.generate([prompt], greedy_params(12), use_tqdm=False)
    return list(output.outputs[0].token_ids)
