"""MINIPAGE_DEBUG=1: who breaks a rule of the cache is told at once, which block it was; who keeps them notices nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import models
from helpers.checks import TIGHT, assert_idle_and_whole, greedy_params, result, run_to_end

from minipage import LLM, BeamSearchParams
from minipage.cache import BlockCopy, BlockTable, Swap
from minipage.engine.debug import CheckedEngine, CheckedKVCache
from minipage.engine.scheduler import Scheduler
from minipage.engine.step import Step

SEED = 5
NEW = 10
PROMPT = models.history_prompt(SEED, 14)

Folders = Callable[[int], Path]


@pytest.fixture(autouse=True)
def debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of this module checks itself."""
    monkeypatch.setenv("MINIPAGE_DEBUG", "1")


def open_llm(folder: Path, **settings: Any) -> LLM:
    """An engine with blocks of four tokens."""
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 40, **settings})


def is_poisoned(llm: LLM, block: int) -> bool:
    """Whether a block holds NaN and nothing else, in all layers, K and V; in int8 that all scales are NaN."""
    kv = llm.engine.runner.kv
    pages = np.concatenate([kv.key[:, block].ravel(), kv.value[:, block].ravel()])
    if pages.dtype == np.int8:
        scales = kv.key[:, block, :, 8:].reshape(2, 2, 16), kv.value[:, block, :, :, 8:]
        return all(bool(np.isnan(each.copy().view(np.float32)).all()) for each in scales)
    return bool(np.all(pages == 0x7FC0) if pages.dtype == np.uint16 else np.all(np.isnan(pages)))


def test_only_where_it_is_asked_for(history: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read when an engine is made; unset, empty and 0 leave it plain, and nothing is checked."""
    for value in (None, "", "0"):
        monkeypatch.setenv("MINIPAGE_DEBUG", value) if value is not None else monkeypatch.delenv("MINIPAGE_DEBUG")
        with open_llm(history(SEED)) as llm:
            monkeypatch.setenv("MINIPAGE_DEBUG", "1")
            assert not isinstance(llm.engine, CheckedEngine)
            assert not isinstance(llm.engine.runner.kv, CheckedKVCache)
    with open_llm(history(SEED)) as llm:
        assert isinstance(llm.engine, CheckedEngine)
        assert isinstance(llm.engine.runner.kv, CheckedKVCache)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        {"preemption_mode": "swap", "swap_space": "1MiB"},
        {"sliding_window": 6},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8", "preemption_mode": "swap", "swap_space": "1MiB"},
    ],
    ids=str,
)
def test_no_trace(history: Folders, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Preempted, forked, beamed, cached: the checks pass, poison is not read, and results are those without them."""
    found = []
    prompts = [models.history_prompt(SEED, 9), *([*models.history_prompt(SEED, 8), i] for i in range(3))]
    for mode in ("0", "1"):
        monkeypatch.setenv("MINIPAGE_DEBUG", mode)
        with open_llm(history(SEED), **{**TIGHT, **settings}) as llm:
            outs = llm.generate(prompts, greedy_params(20, logprobs=2), use_tqdm=False)
            outs += llm.generate(
                prompts[:2], greedy_params(12, n=2, temperature=1.5, seed=3, logprobs=1), use_tqdm=False
            )
            outs += llm.beam_search(prompts[:2], BeamSearchParams(beam_width=2, max_tokens=8), use_tqdm=False)
            found.append([result(output) for out in outs for output in out.outputs])
            assert llm.stats().preemptions > 0 or "sliding_window" in settings
            assert llm.stats().cow_copies > 0
            assert_idle_and_whole(llm)
    assert found[0] == found[1]


# ---- broken rules --------------------------------------------------------------------------------------------------------


def block_named(error: pytest.ExceptionInfo[AssertionError], llm: LLM) -> int:
    """The block that an error names; the engine has aborted the step's requests and is whole."""
    found = re.search(r"block (\d+)", str(error.value))
    assert found is not None
    assert_idle_and_whole(llm)
    return int(found[1])


@pytest.mark.parametrize("num_tokens", [14, 16])
def test_write_into_a_shared_block(history: Folders, monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """A scheduler that forgets to copy on write is caught by the first write into a block of two."""
    with open_llm(history(SEED)) as llm:
        monkeypatch.setattr(BlockTable, "must_copy", lambda self, num_tokens: False)
        llm.engine.add_request("x", models.history_prompt(SEED, num_tokens), greedy_params(NEW, n=3))
        llm.engine.step()
        if num_tokens % 4 == 0:  # the prompt fills its blocks: each goes on in one of its own, and all is well
            run_to_end(llm)
            return
        last = next(iter(llm.engine._tracked.values())).request.sequences[0].tables.blocks[-1]
        with pytest.raises(AssertionError, match="written by a token; it is held 3 times") as error:
            run_to_end(llm)
        assert block_named(error, llm) == last


def test_write_into_a_published_block(history: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the prefix cache has found is not written, though only one holds it."""
    with open_llm(history(SEED)) as llm:
        computed = llm.engine._scheduler.blocks.computed

        def too_early(tables: Any, token_ids: list[int], num_computed: int, salt: str | None) -> None:
            computed(tables, token_ids, num_computed, salt)
            for table in tables.tables:
                table.num_tokens -= 1  # the last token is to be written once more

        def again(self: Scheduler, step: Step) -> None:
            for item in step.scheduled:
                sequence = item.sequence
                count = sequence.num_computed + item.num_tokens
                sequence.num_computed = count - 1
                too_early(sequence.tables, sequence.token_ids, count, item.request.cache_salt)

        monkeypatch.setattr(Scheduler, "advance", again)
        monkeypatch.setattr(BlockTable, "must_copy", lambda self, num_tokens: False)
        llm.engine.add_request("x", PROMPT[:8], greedy_params(NEW))
        with pytest.raises(AssertionError, match="held 1 times, published: True") as error:
            run_to_end(llm)
        block_named(error, llm)


def test_two_tokens_in_one_slot(history: Folders) -> None:
    """Two tokens of a step never go to the same place, be it in the one block that their sequences own."""
    with open_llm(history(SEED)) as llm:
        block = llm.engine._scheduler.blocks.allocator.allocate()
        llm.engine.runner.kv.expect_writes([np.array([block * 4, block * 4 + 1])])
        with pytest.raises(AssertionError, match=f"block {block} has two tokens written"):
            llm.engine.runner.kv.expect_writes([np.array([block * 4 + 1, block * 4, block * 4 + 1])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda step, table: step.copies.append(BlockCopy(table.blocks[1], table.blocks[0])),
            "is copied to; it is held 2 times",
        ),
        (
            lambda step, table: step.copies.append(BlockCopy(table.blocks[0], 39)),
            "block 39 is copied to; it is held 0 times",
        ),
        (lambda step, table: step.swaps_in.append(Swap(0, 39)), "block 39 is swapped to; nobody holds it"),
        (lambda step, table: step.swaps_out.append(Swap(table.blocks[0], 2)), "block 2 is swapped to in the host pool"),
    ],
    ids=["copy into a shared block", "copy into a free block", "swap into a free block", "swap into a free host block"],
)
def test_wrong_copies_and_swaps(
    history: Folders, monkeypatch: pytest.MonkeyPatch, change: Callable[[Step, BlockTable], None], message: str
) -> None:
    """A copy into a block of two, and copies and swaps into blocks of nobody, are refused before they are made."""
    with open_llm(history(SEED), preemption_mode="swap", swap_space="1MiB") as llm:
        llm.engine.add_request("x", PROMPT, greedy_params(NEW, n=2))
        llm.engine.step()
        schedule = Scheduler.schedule

        def sabotaged(self: Scheduler) -> Step:
            step = schedule(self)
            change(step, step.scheduled[0].sequence.tables.tables[0])
            return step

        monkeypatch.setattr(Scheduler, "schedule", sabotaged)
        with pytest.raises(AssertionError, match=message) as error:
            llm.engine.step()
        block_named(error, llm)


def test_books_are_checked_after_each_step(history: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is lost shows in the step that lost it."""
    with open_llm(history(SEED)) as llm:
        llm.engine.add_request("x", PROMPT, greedy_params(NEW))
        llm.engine.step()
        advance = Scheduler.advance

        def forgetful(self: Scheduler, step: Step) -> None:
            advance(self, step)
            self.blocks.allocator.fork(step.scheduled[0].sequence.tables.blocks[0])

        monkeypatch.setattr(Scheduler, "advance", forgetful)
        with pytest.raises(AssertionError, match=r"block \d+ has ref_count 2, but is held by 1"):
            llm.engine.step()


# ---- poison --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_nobody_can_reach_is_poisoned(history: Folders, dtype: str) -> None:
    """Never used, freed and evicted blocks hold NaN once another step runs; held and cached ones hold what they should."""
    with open_llm(history(SEED), device="reference", kv_cache_dtype=dtype, num_blocks=8) as llm:
        # 14 tokens: three full blocks, which stay, and a partial one.
        llm.generate([PROMPT], greedy_params(1), use_tqdm=False)
        allocator = llm.engine._scheduler.blocks.allocator
        cached = allocator.cached_blocks()
        assert len(cached) == 3
        llm.engine.add_request("x", [3] * 5, greedy_params(NEW))
        llm.engine.step()
        held = next(iter(llm.engine._tracked.values())).request.sequences[0].tables.blocks
        good = {*cached, *held}
        assert [block for block in range(8) if not is_poisoned(llm, block)] == sorted(good)
        llm.engine.add_request("y", [4] * 14, greedy_params(1))
        llm.engine.step()
        assert allocator.cached_blocks() != cached
        run_to_end(llm)
        llm.generate([[1]], greedy_params(1), use_tqdm=False)
        left = {*allocator.cached_blocks()}
        assert sum(is_poisoned(llm, block) for block in range(8)) >= 8 - len(left) - 1
        assert not any(is_poisoned(llm, block) for block in left)


def test_stale_read_shows(history: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that lets go of a block too soon makes NaN of what is read there, not something plausible."""
    with open_llm(history(SEED), sliding_window=8, enable_prefix_caching=False) as llm:
        roll = BlockTable.roll

        def too_soon(self: BlockTable, num_tokens: int) -> None:
            blocks, self._window = list(self.blocks), 1
            roll(self, num_tokens)
            self._window = 8
            self.blocks = blocks  # still read, though given back

        monkeypatch.setattr(BlockTable, "roll", too_soon)
        monkeypatch.setattr(BlockTable, "free", lambda self: None)
        monkeypatch.setattr(CheckedEngine, "check_integrity", lambda self: None)
        [output] = llm.generate([PROMPT], greedy_params(NEW), use_tqdm=False)[0].outputs
        assert output.finish_reason == "abort"
        assert "nan" in str(output.stop_reason).lower()


def test_sources_are_read_before_they_are_poisoned(history: Folders) -> None:
    """What a step swaps out or copies may be discarded in the same step: it is read first."""
    with open_llm(history(SEED), preemption_mode="swap", swap_space="1MiB", num_blocks=12) as llm:
        kv = llm.engine.runner.kv
        allocator = llm.engine._scheduler.blocks.allocator
        source, target = allocator.allocate(), allocator.allocate()
        kv.expect_writes([np.array([source * 4])])
        kv.key[:, source] = kv.value[:, source] = 1.0
        allocator.free(source)
        kv.copy([BlockCopy(source, target)])
        kv.expect_writes([np.array([target * 4])])
        assert is_poisoned(llm, source)
        assert not is_poisoned(llm, target)
        assert np.all(kv.key[:, target] == 1.0)
        allocator.free(target)
