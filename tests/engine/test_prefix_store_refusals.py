"""Files of a prefix cache that are refused: those of another engine or model, damaged ones and hostile ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from helpers import models
from helpers.checks import Canary, assert_clean, assert_idle_and_whole
from helpers.prefix_files import PROMPT, SEED, Folders, Tensors, ask, assert_refused, open_llm, read_file

from minipage import InvalidArgumentError
from minipage.engine import prefix_store

# ---- another engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"block_size": 8}, ["block_size is 4 in the file and 8 here"]),
        ({"kv_cache_dtype": "bfloat16"}, ["kv_cache_dtype is 'float32' in the file and 'bfloat16' here"]),
        ({"kv_cache_dtype": "int8"}, ["kv_cache_dtype is 'float32' in the file and 'int8' here"]),
        ({"sliding_window": 8}, ["groups is [[0, 0]] in the file and [[8, 0]] here"]),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, ["model is"]),
        ({"quantization": "int8"}, ["model is"]),
        ({"dtype": "bfloat16", "block_size": 2}, ["model is", "block_size is", "kv_cache_dtype is"]),
    ],
    ids=str,
)
def test_other_settings_are_refused(history: Folders, saved: Path, settings: dict[str, Any], names: list[str]) -> None:
    """An engine that computes or keeps K and V otherwise says in what they differ, both sides named."""
    with open_llm(history(SEED), **settings) as llm:
        message = assert_refused(llm, saved, "another model or engine")
        assert all(name in message for name in names)
        assert ("model is" in message) == (names[0] == "model is" or "sliding_window" in settings)


def test_another_model_is_refused(history: Folders, saved: Path, tmp_path: Path) -> None:
    """Models of the same shape are told apart, by a single weight or by the config; both fingerprints are named."""
    with open_llm(history(SEED)) as llm:
        llm.save_prefix_cache(own := tmp_path / "own")
    engine = json.loads(read_file(own)[1]["engine"])
    others = [history(6)]
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        tensors = models.history_tensors(SEED)
        tensors[name][-1] += 0.01
        others.append(models.write_folder(tmp_path / name, models.HISTORY_CONFIG, tensors))
    others.append(models.history_model(tmp_path / "theta", SEED, rope_theta=5000.0))
    fingerprints = {engine["model"]}
    for folder in others:
        with open_llm(folder) as llm:
            message = assert_refused(llm, saved, "model is '[0-9a-f]{64}' in the file and '[0-9a-f]{64}' here")
            assert engine["model"] in message
            fingerprints.add(message.split("'")[3])
    assert len(fingerprints) == 1 + len(others)


def test_kinds_of_the_same_weights_are_told_apart(tmp_path: Path) -> None:
    """Weights that are stored and multiplied in another kind give other bits, though their values are the same."""
    folder = models.history_model(tmp_path / "model", SEED, dtype="bfloat16")
    with open_llm(folder, device="reference", dtype="float32") as llm:
        llm.save_prefix_cache(tmp_path / "cache")
    with open_llm(folder, device="reference", dtype="bfloat16", kv_cache_dtype="float32") as llm:
        assert_refused(llm, tmp_path / "cache", "model is")


def test_large_matrices_are_told_apart(tmp_path: Path) -> None:
    """Of a matrix of more than a megabyte the first and the last row count, and rows evenly spaced between them."""
    shape: dict[str, Any] = {"vocab_size": 9000, "num_hidden_layers": 1}
    config = {**models.HISTORY_CONFIG, **shape}
    fingerprints = set()
    for row in (None, 0, 4500, 8999):
        tensors = models.history_tensors(SEED, config)
        if row is not None:
            tensors["model.embed_tokens.weight"][max(row - 300, 0) : row + 300, 1] += 0.01
        with open_llm(models.write_folder(tmp_path / str(row), config, tensors), num_blocks=2) as llm:
            llm.save_prefix_cache(tmp_path / "cache")
        fingerprints.add(json.loads(read_file(tmp_path / "cache")[1]["engine"])["model"])
    assert len(fingerprints) == 4


def test_without_a_prefix_cache(history: Folders, saved: Path) -> None:
    """An engine without one neither saves nor loads, and says so; a closed engine does not either."""
    llm = open_llm(history(SEED), enable_prefix_caching=False)
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(InvalidArgumentError, match="enable_prefix_caching=False"):
            call(saved)
    llm.close()
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(RuntimeError, match="closed"):
            call(saved)


# ---- damaged and hostile files -------------------------------------------------------------------------------------------


def test_damaged_files_are_refused(
    history: Folders, saved: Path, tmp_path: Path, canary: Callable[[int], Canary]
) -> None:
    """A file that was cut, or in which any one byte was changed, is an error and changes nothing."""
    content, path = saved.read_bytes(), tmp_path / "damaged"
    rng = np.random.default_rng(1)
    header = int.from_bytes(content[:8], "little")
    places = [*range(8), *rng.integers(8, 8 + header, 60), *rng.integers(8 + header, len(content), 40)]
    with open_llm(history(SEED)) as llm:
        for length in (0, 7, 8, 100, 8 + header, len(content) - 1):
            path.write_bytes(content[:length])
            assert_refused(llm, path, "damaged")
        for place in map(int, places):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 7]) + content[place + 1 :])
            assert_refused(llm, path, "damaged")
        assert_clean(llm, canary(SEED))
        assert llm.load_prefix_cache(saved) == 9


def forge(path: Path, saved: Path, changes: Tensors, metadata: dict[str, str]) -> Path:
    """A file with some tensors and metadata of its own, and the digest that belongs to them."""
    tensors, about = read_file(saved)
    tensors = {name: array for name, array in {**tensors, **changes}.items() if array is not None}
    about |= metadata
    if "digest" not in metadata:
        about["digest"] = prefix_store._digest(about, tensors.__getitem__, tensors)
    safetensors.numpy.save_file(tensors, path, about)
    return path


def forgeries(saved: Path) -> dict[str, tuple[Tensors, dict[str, str]]]:
    """What a file could say to do harm: the tensors and metadata that it changes."""
    tensors, about = read_file(saved)
    engine = json.loads(about["engine"])

    def change(name: str, value: int, index: Any = -1) -> tuple[Tensors, dict[str, str]]:
        array = tensors[name].copy()
        array[index] = value
        return {name: array}, {}

    return {
        "a node is its own parent": change("parents", 8),
        "a later node is the parent": change("parents", 5, 3),
        "a salt that is not there": change("parents", -2),
        "the lowest parent": change("parents", -(1 << 63)),
        "a token below the vocabulary": change("tokens", -1),
        "a token above it": change("tokens", models.VOCAB_SIZE),
        "a holder above the nodes": change("holders", 9),
        "a holder below them": change("holders", -1),
        "fewer holders than blocks": ({"holders": tensors["holders"][:4]}, {}),
        "fewer tokens than nodes": ({"tokens": tensors["tokens"][:4]}, {}),
        "no parents": ({"parents": None}, {}),
        "scalar parents": ({"parents": np.array(3)}, {}),
        "float parents": ({"parents": tensors["parents"].astype(np.float64)}, {}),
        "another kind of K": ({"key.1": tensors["key.1"].view(np.int32)}, {}),
        "a layer less": ({"value.1": None}, {}),
        "a tensor more": ({"more": tensors["key.1"]}, {}),
        "salts that are no strings": ({}, {"salts": "[[0]]"}),
        "salts that are no list": ({}, {"salts": '"0/"'}),
        "deep salts": ({}, {"salts": "[" * 100_000}),
        "a later format": ({}, {"engine": json.dumps({**engine, "format": 2})}),
        "no engine at all": ({}, {"engine": "[]"}),
        "a huge number": ({}, {"engine": '{"format": ' + "1" * 10_000 + "}"}),
        "another salt": ({}, {"salts": '["0/other"]', "digest": about["digest"]}),
        "a wrong digest": ({}, {"digest": "0" * 64}),
    }


def test_hostile_files_are_refused(
    history: Folders, saved: Path, tmp_path: Path, canary: Callable[[int], Canary]
) -> None:
    """Whoever makes a file that is whole but makes no sense gets an error, and the engine goes on as it was."""
    with open_llm(history(SEED)) as llm:
        for what, (tensors, metadata) in forgeries(saved).items():
            path = forge(tmp_path / "forged", saved, tensors, metadata)
            message = assert_refused(llm, path, "forged")
            assert len(message) < 1000, what
        assert_clean(llm, canary(SEED))


def test_keys_come_from_tokens(history: Folders, saved: Path, tmp_path: Path) -> None:
    """A file is found by the tokens that it says; nothing in it can make one prompt find the blocks of another."""
    tensors, _ = read_file(saved)
    assert set(tensors) == {
        "parents",
        "tokens",
        "holders",
        *(f"{kind}.{i}" for kind in ("key", "value") for i in (0, 1)),
    }
    tokens = tensors["tokens"].copy()
    tokens[0, 0] = (tokens[0, 0] + 1) % models.VOCAB_SIZE
    doubled = np.concatenate([tensors["holders"], tensors["holders"]])
    kv = {name: np.concatenate([array, array]) for name, array in tensors.items() if name[:3] in ("key", "val")}
    path = forge(tmp_path / "forged", saved, {"tokens": tokens, "holders": doubled, **kv}, {})
    with open_llm(history(SEED)) as llm:
        assert llm.load_prefix_cache(path) == 9
        assert_idle_and_whole(llm)
        assert ask(llm, PROMPT)[1] == 0
        assert ask(llm, [int(tokens[0, 0]), *PROMPT[1:]])[1] == 28


def test_what_is_no_file_is_refused(history: Folders, tmp_path: Path) -> None:
    """A path that is not there, a folder, a pipe and what is no path at all are each a clear error."""
    os.mkfifo(tmp_path / "pipe")
    with open_llm(history(SEED)) as llm:
        for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", history(SEED) / "model.safetensors"):
            assert_refused(llm, path, "is not allowed|not a valid file")
        for bad in (None, 3, b"bytes", "nul\0", str(tmp_path / ("x" * 300))):
            for call in (llm.save_prefix_cache, llm.load_prefix_cache):
                with pytest.raises(InvalidArgumentError, match="path="):
                    call(bad)  # type: ignore[operator]
