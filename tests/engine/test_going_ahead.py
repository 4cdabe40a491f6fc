"""Tokens that are on their way from the device: those that cannot be drawn, and who may go ahead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minipage import SamplingParams
from minipage.engine.drawing import Launched, Wanted
from minipage.engine.sampler import Biases, SampledToken, SamplingError, SamplingRow


class FakeRunner:
    """A device that draws these tokens, from logits that are all NaN."""

    samples = True

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.read: list[tuple[int, int]] = []

    def compute_logits(self, rows: list[int], draws: Any) -> Callable[[], list[int]]:
        return lambda: self.token_ids

    def read_logits(self, start: int, stop: int) -> np.ndarray:
        self.read.append((start, stop))
        return np.full((stop - start, 9), np.nan, np.float32)


def launched(token_ids: list[int], *params: SamplingParams) -> Launched:
    """A token for each of some requests."""
    asks = [[SamplingRow(each, 1, 0, 5, biases=Biases.of(each))] for each in params]
    tracked: Any = SimpleNamespace(wants_logits=False)
    item: Any = None
    part = [Wanted(tracked, item, range(row, row + 1)) for row in range(len(params))]
    runner: Any = FakeRunner(token_ids)
    return Launched(runner, part, asks)


PLAIN = SamplingParams(temperature=0.7, top_p=0.9)


def test_a_row_without_a_token_says_why() -> None:
    """The host looks at its logits, as long as they are there; else it says what they may have been."""
    for are_there, words in ((True, "the logit of token 0 is nan"), (False, "one is nan or inf, or all are -inf")):
        first, second = launched([-1, 3], PLAIN, PLAIN).read(are_there)
        assert second.tokens == [SampledToken(3)]
        assert isinstance(first.tokens[0], SamplingError) and words in str(first.tokens[0])


@pytest.mark.parametrize(
    "params", [{"logprobs": 0}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"logit_bias": {1: 2.0}}]
)
def test_only_plain_rows_are_drawn_on_the_device(params: dict[str, Any]) -> None:
    """Penalties, bias and logprobs are the host's work, and keep the others from going ahead."""
    assert launched([1, 2], PLAIN, PLAIN).is_whole
    assert not launched([1], PLAIN, SamplingParams(**params)).is_whole
