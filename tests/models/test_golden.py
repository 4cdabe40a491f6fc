"""REF and minipage against what the transformers library computed (scripts/make_golden.py) from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ref
from helpers.checks import greedy_params, logprob_matrix

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "golden").glob("*/golden.npz"))
TOLERANCE = 1e-4


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """A checkpoint folder and its golden arrays."""
    folder: Path = request.param
    with np.load(folder / "golden.npz") as arrays:
        return folder, dict(arrays)


def test_there_are_golden_models() -> None:
    """The golden files are in the tree, so that the tests below do not pass by having nothing to do."""
    assert len(FOLDERS) >= 9


def test_ref_equals_transformers(golden: tuple[Path, dict[str, Any]]) -> None:
    """REF's logits equal the golden ones at every position, and its greedy tokens are the golden ones."""
    folder, arrays = golden
    model = ref.Reference(folder)
    prompt = arrays["prompt"].tolist()
    np.testing.assert_allclose(model.logits(prompt), arrays["logits"], atol=TOLERANCE, rtol=0)
    assert ref.greedy(model, prompt, len(arrays["greedy"])) == arrays["greedy"].tolist()


def test_engine_equals_transformers(golden: tuple[Path, dict[str, Any]]) -> None:
    """The engine's log probabilities equal the golden ones at every position, and so do its greedy tokens."""
    from minipage import LLM

    folder, arrays = golden
    prompt, vocab = arrays["prompt"].tolist(), arrays["logits"].shape[1]
    with LLM(str(folder), device="cpu", dtype="float32", block_size=4, num_blocks=64, max_num_batched_tokens=7) as llm:
        [out] = llm.generate(
            [prompt], greedy_params(len(arrays["greedy"]), logprobs=vocab, prompt_logprobs=vocab), use_tqdm=False
        )
        llm.check_integrity()
    assert list(out.outputs[0].token_ids) == arrays["greedy"].tolist()
    found = logprob_matrix([*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]], vocab)
    np.testing.assert_allclose(found, ref.log_softmax(arrays["logits"]), atol=TOLERANCE, rtol=0)
