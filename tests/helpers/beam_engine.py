"""An engine to search with beams, and a search in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.pressure import poison

from minipage import LLM, BeamSearchParams
from minipage.outputs import RequestOutput


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine on the CPU in float32 with blocks of four tokens, all of them full of NaN."""
    llm = LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 256, **options})
    poison(llm)
    return llm


def search(llm: LLM, prompt: Sequence[int], params: BeamSearchParams) -> RequestOutput:
    """One beam search."""
    [out] = llm.beam_search(list(prompt), params, use_tqdm=False)
    return out
