"""The fixtures that other tests lean on are what they claim to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import models, ref, ref_files


def test_script_model_says_the_table(tmp_path: Path) -> None:
    """The logits after token i are exactly row i of the table, in float32, whatever came before."""
    table = np.random.default_rng(0).normal(0, 5, (21, 21)).astype(np.float32)
    model = ref.Reference(models.script_model(tmp_path, table), np.float32)
    prompt = [3, 20, 0, 3, 7]
    np.testing.assert_array_equal(model.logits(prompt), table[prompt])


@pytest.mark.parametrize("seed", models.SAFE_SEEDS)
def test_safe_seeds_are_safe(tmp_path: Path, seed: int) -> None:
    """The two best logits stay 0.05 apart over 24 greedy steps, in which the last token alone does not decide."""
    model = ref.Reference(models.history_model(tmp_path, seed))
    prompt = models.history_prompt(seed)
    assert ref.smallest_gap(model, prompt, 24) >= 0.05
    expected = ref.greedy(model, prompt, 24)
    assert ref.greedy(model, [*prompt[1:6], prompt[0], *prompt[6:]], 24) != expected
    assert ref.greedy(model, prompt, 24, window=8) != ref.greedy(model, prompt, 24, window=9)


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    """A bfloat16 file holds the nearest values, ties to the even one."""
    values = np.array([1.0, 1.00390625, 1.01171875, -1.003907, 3.14159265, 1e-30], dtype=np.float32)
    models.write_safetensors(tmp_path / "model.safetensors", {"x": values}, "bfloat16")
    (tmp_path / "config.json").write_text("{}")
    found = ref_files.read_folder(tmp_path)[1]["x"]
    assert found[:5].tolist() == [1.0, 1.0, 1.015625, -1.0078125, 3.140625]
    np.testing.assert_allclose(found, values, rtol=2**-8)


def test_gguf_rows_return_to_halves() -> None:
    """The row order of GGUF's q and k, in which partners in rotation are neighbours, is undone."""
    heads, size = 3, 8
    halves = np.arange(heads * size)
    pairs = halves.reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)  # what the converter writes
    np.testing.assert_array_equal(ref_files.halves_from_pairs(pairs, heads), halves)
