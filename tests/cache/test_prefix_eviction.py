"""What the prefix cache forgets first, and the books that it keeps of what it holds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from helpers.prefix_pool import BLOCK_SIZE, Pool

from minipage.cache import BlockAllocator, BlockTable, PrefixCache


# ---- eviction --------------------------------------------------------------------------------------------------------
def test_tails_are_evicted_first() -> None:
    """After one eviction a chain of three still gives two blocks."""
    pool = Pool(8)
    prompt = list(range(12))
    pool.run([*prompt, 12])
    assert pool.allocator.num_cached_blocks == 3
    unrelated, _ = pool.start(list(range(100, 124)))
    assert pool.cache.match(prompt, 12) == pool.cache.match(prompt, 8) != []
    unrelated.free()
    assert pool.run([*prompt, 12]) == 8


def test_a_recycled_block_is_forgotten() -> None:
    """Under steady eviction, what is found is what was asked for, for 30 random prompts and one that comes back."""
    rng = random.Random(29)
    pool = Pool(8)
    contents: dict[int, list[int]] = {}

    def ask(tokens: list[int]) -> None:
        hits = pool.cache.match(tokens, len(tokens) - 1)
        for i, block in enumerate(hits):
            assert contents[block] == tokens[: (i + 1) * BLOCK_SIZE]
        table, found = pool.start(tokens)
        assert table.blocks[: len(hits)] == hits
        assert found == len(hits) * BLOCK_SIZE
        contents.update((block, tokens[: (i + 1) * BLOCK_SIZE]) for i, block in enumerate(table.blocks))
        pool.allocator.check_integrity([table])
        table.free()

    prompt = [rng.randrange(2) for _ in range(13)]
    for _ in range(30):
        ask([rng.randrange(2) for _ in range(rng.randrange(1, 30))])
        ask(prompt)
    assert pool.allocator.num_free_blocks == 8


def test_a_hit_keeps_a_chain_from_eviction() -> None:
    """The least recently used chain goes first, and a hit is a use."""
    pool = Pool(4)
    pool.run([1] * 8)
    pool.run([2] * 8)
    assert pool.run([1] * 9) == 8
    assert len(pool.cache.match([1] * 8, 8)) == 2
    assert len(pool.cache.match([2] * 8, 8)) == 1


def test_hits_are_not_counted_as_room() -> None:
    """Four hits that are the only free blocks leave none for the rest; refused, the request leaves no trace."""
    pool = Pool(6)
    prompt = list(range(16))
    pool.run([*prompt, 16])
    running, _ = pool.start(list(range(50, 55)))
    longer = [*prompt, *range(70, 75)]
    hits = pool.cache.match(longer, len(longer) - 1)
    assert len(hits) == 4 == pool.allocator.num_free_blocks
    assert pool.allocator.shortage(6, hits) > 0
    assert pool.cache.match(longer, len(longer) - 1) == hits
    pool.allocator.check_integrity([running])
    running.free()
    assert pool.allocator.shortage(6, hits) <= 0
    admitted, found = pool.start(longer)
    assert found == 16
    assert admitted.blocks[:4] == hits
    pool.allocator.check_integrity([admitted])


# ---- the books -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.cache._prefixes.pop(0),
        lambda pool: pool.cache._blocks.clear(),
        lambda pool: pool.cache._blocks.__setitem__(b"stale", 3),
        lambda pool: pool.allocator._cached.remove(0),
    ],
)
def test_check_integrity_finds_damaged_entries(damage: Callable[[Pool], object]) -> None:
    """Entries that disagree with each other or with the allocator's marks are an AssertionError with a block's number."""
    pool = Pool(4)
    table, _ = pool.start([1, 2, 3, 4])
    assert table.blocks == [0]
    pool.cache.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=r"block \d"):
        pool.cache.check_integrity()


def test_very_long_chains_are_released() -> None:
    """Chains of 50,000 blocks are published, found and dropped without running into Python's recursion limit."""
    allocator = BlockAllocator(50_000)
    cache = PrefixCache(allocator, 1)
    table = BlockTable(allocator, 1)
    tokens = list(range(50_000))
    table.append(50_000)
    cache.publish(table, tokens, 50_000)
    assert cache.match(tokens, 50_000) == table.blocks
    assert "Prefix" in repr(table.prefix)
    table.free()
    other = BlockTable(allocator, 1)
    other.append(50_000)
    assert allocator.num_cached_blocks == 0
