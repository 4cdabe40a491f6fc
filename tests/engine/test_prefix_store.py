"""A prefix cache that outlives its process: warm after a restart, as far as there is room, from a file that is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from helpers import models
from helpers.checks import Canary, assert_clean, assert_idle_and_whole, greedy_params
from helpers.prefix_files import NEW, PROMPT, SEED, Folders, ask, open_llm, read_file

from minipage import BeamSearchParams, InvalidArgumentError, SamplingParams

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
