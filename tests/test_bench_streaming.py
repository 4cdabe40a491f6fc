"""scripts/bench_streaming.py: its numbers are those of the oracle, and it says so where a text got too hard to read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models, ref
from helpers.tokenizers import f3_backend, write_tokenizer

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_streaming.py"
SEED, TRAINED = 5, 40
TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history model that reads bytes, trained for fewer than the text has."""
    folder, backend = tmp_path_factory.mktemp("history"), f3_backend()
    tokenizer = write_tokenizer(folder / "tokenizer", backend)
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": TRAINED}
    return models.history_model(folder / "model", SEED, tokenizer=tokenizer, **sizes)


def run(model: Path, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The script on a short text."""
    (folder / "text.txt").write_text(TEXT)
    chosen = {
        "model": model,
        "file": folder / "text.txt",
        "device": "reference",
        "tokens": 72,
        "short": 24,
        "window": 8,
    }
    chosen |= {"sinks": 3, "chunk": 5, "write": 4, "json": folder / "rows.json", **options}
    arguments = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, encoding="utf-8", check=False)


def test_perplexities_are_those_of_the_oracle(model: Path, tmp_path: Path) -> None:
    """Each span's perplexity, with sinks, with a window alone and with all in view; the table and the rows have them."""
    done = run(model, tmp_path)
    rows = {row["name"].removeprefix("streaming/"): row for row in json.loads((tmp_path / "rows.json").read_text())}
    token_ids = f3_backend().encode(TEXT).ids[:72]
    oracle = ref.Reference(model)
    for name, stop, sight in (("sinks", 72, (8, 3)), ("window", 72, (11, 0)), ("all", 24, (None, 0))):
        scores = ref.log_softmax(oracle.logits(token_ids[:stop], *sight))
        surprise = -scores[np.arange(stop - 1), token_ids[1:stop]]
        for start, end in ((0, 24), (0, 72), (24, 48), (48, 72)):
            if end <= stop:
                expected = math.exp(surprise[max(start - 1, 0) : end - 1].mean())
                found = rows[f"perplexity/{name}/{start}-{end}"]["value"]
                assert found == pytest.approx(expected, rel=1e-4)
                assert f"{found:,.2f}" in done.stdout
    assert rows["growth/sinks"]["ratio"] == rows["growth/sinks"]["value"] / 2
    assert done.returncode == (rows["growth/sinks"]["value"] > 2)
    assert rows["blocks/sinks"]["value"] <= 3 and rows["blocks/window"]["value"] <= 3
    assert "perplexity/all/0-72" not in rows
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tokens": 5000}, "the text has"), ({"short": 100}, "--short"), ({"write": 0}, "--write")],
)
def test_bad_options(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """What cannot be measured is one line on standard error."""
    done = run(model, tmp_path, **options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
