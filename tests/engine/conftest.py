"""Fixtures of the end-to-end tests: the history model's folders, their oracles and a file of its prefix cache, each made once,
and scripted models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import models, ref, tokenizers
from helpers.checks import Canary, assert_idle_and_whole
from helpers.prefix_files import PROMPT, SEED, ask, open_llm
from helpers.scripted import OpenScript, V

from minipage import LLM

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


@pytest.fixture
def open_script(tmp_path: Path) -> Iterator[OpenScript]:
    """Opens an engine on a script model; afterwards it must be idle and whole."""
    opened: list[LLM] = []
    folders = (tmp_path / str(i) for i in itertools.count())

    def open_one(*chains: Sequence[int], backend: Any = None, generation_config: Any = None, **config: Any) -> LLM:
        folder = next(folders)
        tokenizer = tokenizers.write_tokenizer(folder / "tokenizer", backend or tokenizers.f3_backend())
        model = models.script_model(
            folder / "model",
            models.script_table(V, *chains),
            tokenizer=tokenizer,
            generation_config=generation_config,
            **config,
        )
        opened.append(LLM(str(model), device="cpu", dtype="float32", block_size=4, num_blocks=64))
        return opened[-1]

    yield open_one
    for llm in opened:
        assert_idle_and_whole(llm)
        llm.close()
