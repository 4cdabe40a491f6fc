"""Files of a prefix cache: the engine that writes and reads them, what it is asked, and how it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import models
from helpers.checks import Result, assert_idle_and_whole, greedy_params, result
from safetensors import safe_open

from minipage import LLM, InvalidArgumentError

SEED = 5  #: of the history model
NEW = 10  #: tokens of an answer
PROMPT = models.history_prompt(SEED, 30)

Folders = Callable[[int], Path]
Tensors = dict[str, Any]


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine with blocks of four tokens."""
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 64, **settings})


def ask(llm: LLM, prompt: list[int], salt: str | None = None) -> tuple[Result, int]:
    """What it says to a prompt, and how many tokens of that were cached."""
    [out] = llm.generate([prompt], greedy_params(NEW, logprobs=2), use_tqdm=False, cache_salt=salt)
    return result(out.outputs[0]), out.num_cached_tokens


def read_file(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A file's tensors and metadata."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def assert_refused(llm: LLM, path: Path, match: str) -> str:
    """Loading is one clear error that names the file, and changes nothing; returns what it says."""
    before = llm.stats()
    with pytest.raises(InvalidArgumentError, match=match) as error:
        llm.load_prefix_cache(path)
    assert str(path) in str(error.value)
    assert llm.stats() == before
    assert_idle_and_whole(llm)
    return str(error.value)
