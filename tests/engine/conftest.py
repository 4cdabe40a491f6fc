"""Fixtures of the end-to-end tests: the history model's folders and their oracles, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers import models, ref
from helpers.checks import Canary

CANARY_TOKENS = 5


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the history model of a seed."""
    return cache(lambda seed: models.history_model(tmp_path_factory.mktemp("history"), seed))


@pytest.fixture(scope="session")
def oracle(history: Callable[[int], Path]) -> Callable[[int], ref.Reference]:
    """REF of the history model of a seed."""
    return cache(lambda seed: ref.Reference(history(seed)))


@pytest.fixture(scope="session")
def canary(oracle: Callable[[int], ref.Reference]) -> Callable[[int], Canary]:
    """A prompt, and what the history model of a seed has to say to it; it fits the smallest pool of these tests."""

    def make(seed: int) -> Canary:
        [prompt] = ref.safe_prompts(oracle(seed), [3], CANARY_TOKENS, seed=77)
        return Canary(prompt, ref.greedy(oracle(seed), prompt, CANARY_TOKENS))

    return cache(make)
