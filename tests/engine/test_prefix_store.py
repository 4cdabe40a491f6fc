"""A prefix cache that outlives its process: warm after a restart, for the model that it is of, and for nothing else."""

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
from helpers.checks import Canary, Result, assert_clean, assert_idle_and_whole, greedy_params, result
from safetensors import safe_open

from minipage import LLM, BeamSearchParams, InvalidArgumentError, SamplingParams
from minipage.engine import prefix_store

SEED = 5
NEW = 10
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


@pytest.fixture(scope="module")
def saved(history: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all that one request has computed: 9 full blocks of 39 tokens."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    with open_llm(history(SEED)) as llm:
        ask(llm, PROMPT)
        assert llm.save_prefix_cache(path) == llm.stats().num_cached_blocks == 9
    return path


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


# ---- warm after a restart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int8", "device": "reference"},
        {"sliding_window": 8},
        {"device": "reference", "dtype": "float16"},
    ],
    ids=str,
)
def test_warm_restart(history: Folders, tmp_path: Path, settings: dict[str, Any]) -> None:
    """An engine that has loaded the file finds all that the other had computed, and gives the same bits."""
    path = tmp_path / "cache.safetensors"
    with open_llm(history(SEED), **settings) as llm:
        cold, num_cached = ask(llm, PROMPT)
        assert num_cached == 0
        num_blocks = llm.save_prefix_cache(path)
        assert ask(llm, PROMPT) == (cold, 28)
    with open_llm(history(SEED), **settings) as llm:
        assert llm.load_prefix_cache(str(path)) == num_blocks > 0
        assert_idle_and_whole(llm)
        assert llm.stats().num_cached_blocks == num_blocks
        assert ask(llm, PROMPT) == (cold, 28)
        assert llm.stats().prefix_cache_hit_tokens == 28
        assert ask(llm, [*PROMPT, *cold.token_ids])[1] == 36
        assert_idle_and_whole(llm)


def test_another_layout_of_the_same_model(history: Folders, saved: Path) -> None:
    """What was saved on one device is warm on another; limits and names of files make no difference."""
    with open_llm(history(SEED), device="reference", max_model_len=100, num_blocks=20, max_num_seqs=3) as llm:
        assert llm.load_prefix_cache(saved) == 9
        warm, num_cached = ask(llm, PROMPT)
    with open_llm(history(SEED), device="reference") as llm:
        cold, _ = ask(llm, PROMPT)
    assert num_cached == 28
    assert warm.token_ids == cold.token_ids


def test_simulated_gpu(history: Folders, saved: Path) -> None:
    """The CUDA layout takes and gives the same file; nothing is computed for it here."""
    pytest.importorskip("numba_cuda")
    with open_llm(history(SEED), device="cuda-sim") as llm:
        assert llm.load_prefix_cache(saved) == 9
        llm.save_prefix_cache(copy := saved.parent / "copy.safetensors")
    tensors, copied = read_file(saved)[0], read_file(copy)[0]
    assert tensors.keys() == copied.keys()
    assert all(np.array_equal(tensors[name], copied[name]) for name in tensors)


def test_layers_with_and_without_a_window(tmp_path: Path) -> None:
    """Groups of layers keep their own blocks: what windows left behind is saved as well, and prefixes are found in all."""
    folder = models.history_model(
        tmp_path / "model",
        SEED,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    )
    path = tmp_path / "cache.safetensors"
    with open_llm(folder) as llm:
        assert set(llm.info.config.windows) == {0, 6}
        cold, _ = ask(llm, PROMPT)
        num_blocks = llm.save_prefix_cache(path)
        assert num_blocks == 9 * 3
    with open_llm(folder) as llm:
        assert llm.load_prefix_cache(path) == num_blocks
        assert ask(llm, PROMPT) == (cold, 28)
        assert ask(llm, PROMPT[:17])[1] == 16
    with open_llm(folder, num_blocks=18) as llm:  # six blocks of each group: the heads of all
        assert llm.load_prefix_cache(path) == 18
        assert ask(llm, PROMPT) == (cold, 24)


def test_while_others_run(history: Folders, saved: Path, tmp_path: Path) -> None:
    """A busy engine saves what it shares at the moment, and loads beside what runs."""
    with open_llm(history(SEED)) as llm:
        cold, _ = ask(llm, PROMPT)
    with open_llm(history(SEED)) as llm:
        llm.engine.add_request("other", models.history_prompt(3, 20), greedy_params(NEW))
        for _ in range(3):
            llm.engine.step()
        assert llm.load_prefix_cache(saved) == 9
        assert ask(llm, PROMPT) == (cold, 28)
        assert llm.save_prefix_cache(tmp_path / "cache") >= 9 + 5
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        assert_idle_and_whole(llm)


def test_salts_stay_apart(history: Folders, tmp_path: Path) -> None:
    """What was computed under a salt is found under it alone, by all calls that take one, before a restart and after."""
    path, salt = tmp_path / "cache", 'tenant "é" \ud83d'
    with open_llm(history(SEED)) as llm:
        cold, _ = ask(llm, PROMPT, salt)
        assert [ask(llm, PROMPT, other)[1] for other in ("tenant", None)] == [0, 0]
        llm.save_prefix_cache(path)
        with pytest.raises(InvalidArgumentError, match="cache_salt=3 is not allowed"):
            ask(llm, PROMPT, 3)  # type: ignore[arg-type]
    with open_llm(history(SEED)) as llm:
        assert llm.load_prefix_cache(path) == 27
        assert ask(llm, PROMPT, salt) == (cold, 28)
        assert ask(llm, PROMPT, "other")[1] == 0
        assert [out.num_cached_tokens for out in llm.stream(PROMPT, greedy_params(1), cache_salt=salt)] == [28]
        assert [out.num_cached_tokens for out in llm.stream(PROMPT, greedy_params(1), cache_salt="new")] == [0]
        beams = BeamSearchParams(beam_width=2, max_tokens=2)
        assert llm.beam_search([PROMPT], beams, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens == 28
        assert llm.beam_search([PROMPT], beams, use_tqdm=False, cache_salt="newer")[0].num_cached_tokens == 0


# ---- room ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3, 8, 9, 10])
def test_room_for_some(history: Folders, saved: Path, num_blocks: int, canary: Callable[[int], Canary]) -> None:
    """As many blocks as there are, from the beginning of the prompt on."""
    with open_llm(history(SEED), num_blocks=num_blocks) as llm:
        assert llm.load_prefix_cache(saved) == min(num_blocks, 9)
        assert llm.load_prefix_cache(saved) == 0
        assert llm.stats().num_free_blocks == num_blocks
        prompt = PROMPT[: 4 * min(num_blocks, 7) - 1]
        [out] = llm.generate([prompt], greedy_params(1), use_tqdm=False)
        assert out.num_cached_tokens == (len(prompt) - 1) // 4 * 4
        if num_blocks >= 3:
            assert_clean(llm, canary(SEED))


def test_nothing_is_evicted_to_make_room(history: Folders, saved: Path) -> None:
    """What is cached stays, and what runs does; only blocks that hold nothing are filled."""
    with open_llm(history(SEED), num_blocks=12) as llm:
        mine = models.history_prompt(3, 30)
        cold, _ = ask(llm, mine)
        assert llm.stats().num_cached_blocks == 9
        assert llm.load_prefix_cache(saved) == 3
        assert ask(llm, PROMPT[:13])[1] == 12
        assert_idle_and_whole(llm)
    with open_llm(history(SEED), num_blocks=12) as llm:
        ask(llm, mine)
        llm.load_prefix_cache(saved)
        assert ask(llm, mine) == (cold, 28)


def test_loaded_blocks_are_evicted_tail_first(history: Folders, saved: Path) -> None:
    """Loaded blocks give way like any others: the end of a chain before its beginning."""
    with open_llm(history(SEED), num_blocks=9) as llm:
        assert llm.load_prefix_cache(saved) == 9
        llm.generate([models.history_prompt(3, 15)], greedy_params(1), use_tqdm=False)
        assert llm.stats().num_cached_blocks == 9 - 4 + 3
        [out] = llm.generate([PROMPT], greedy_params(1), use_tqdm=False)
        assert out.num_cached_tokens == 20


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


# ---- writing -------------------------------------------------------------------------------------------------------------


def test_file_is_replaced_whole(history: Folders, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where saving fails, the file is as it was and nothing is left beside it; else it is the new one."""
    path = tmp_path / "cache"
    path.write_bytes(saved.read_bytes())
    with open_llm(history(SEED)) as llm:
        for bad in (tmp_path / "no folder" / "cache", tmp_path):
            with pytest.raises(InvalidArgumentError, match="existing folder"):
                llm.save_prefix_cache(bad)
        with monkeypatch.context() as patched:

            def fail(tensors: Any, name: Path, metadata: Any) -> None:
                name.write_bytes(b"half")
                raise safetensors.SafetensorError("no space left")

            patched.setattr(safetensors.numpy, "save_file", fail)
            with pytest.raises(OSError, match="no space left"):
                llm.save_prefix_cache(path)
        assert path.read_bytes() == saved.read_bytes()
        assert os.listdir(tmp_path) == ["cache"]
        os.link(path, before := tmp_path.parent / f"{tmp_path.name}-before")
        assert llm.save_prefix_cache(path) == 0
        assert llm.load_prefix_cache(path) == 0
        assert os.listdir(tmp_path) == ["cache"]
        assert before.read_bytes() == saved.read_bytes()  # who reads it meanwhile reads on in the file that it was


def test_saving_twice_gives_the_same_file(history: Folders, saved: Path, tmp_path: Path) -> None:
    """What was loaded is saved again as it came."""
    with open_llm(history(SEED)) as llm:
        llm.load_prefix_cache(saved)
        llm.save_prefix_cache(tmp_path / "again")
        [out] = llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
        assert out.num_cached_tokens == 28
    first, second = read_file(saved), read_file(tmp_path / "again")
    assert first[1] == second[1]
    assert all(np.array_equal(first[0][name], second[0][name]) for name in first[0])
