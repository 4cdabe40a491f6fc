"""Fixtures of the end-to-end tests: the history model's folders, their oracles and a file of its prefix cache, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers import models, ref
from helpers.checks import Canary
from helpers.prefix_files import PROMPT, SEED, ask, open_llm

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


@pytest.fixture(scope="session")
def saved(history: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix cache's file with all that one request has computed: 9 full blocks of 39 tokens."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    with open_llm(history(SEED)) as llm:
        ask(llm, PROMPT)
        assert llm.save_prefix_cache(path) == llm.stats().num_cached_blocks == 9
    return path
