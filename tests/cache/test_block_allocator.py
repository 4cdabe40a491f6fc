"""The allocator's rules."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from minipage.cache import BlockAllocator, OutOfBlocks


def cached_blocks(allocator: BlockAllocator, count: int) -> list[int]:
    """``count`` evictable blocks, least recently used first."""
    blocks = [allocator.allocate() for _ in range(count)]
    for block in blocks:
        allocator.mark_cached(block)
    for block in blocks:
        allocator.free(block)
    return blocks


def test_a_pool_hands_out_each_block_once_and_then_raises() -> None:
    """All blocks of a pool can be held at once, each by one holder; one more is OutOfBlocks and changes nothing."""
    allocator = BlockAllocator(3)
    assert sorted(allocator.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocks, match="3"):
        allocator.allocate()
    assert allocator.num_free_blocks == 0
    allocator.check_integrity([], pins=[0, 1, 2])


def test_a_block_is_free_after_as_many_frees_as_references() -> None:
    """A block with two references survives one free."""
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    assert allocator.fork(block) == block
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free_blocks) == (1, 1)
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free_blocks) == (0, 2)


def test_misuse_names_the_block_and_changes_nothing() -> None:
    """Double frees, forks of free blocks, foreign ids and double publications are ValueErrors without effect."""
    allocator = BlockAllocator(3)
    held, freed = allocator.allocate(), allocator.allocate()
    allocator.mark_cached(held)
    allocator.free(freed)
    misuses = [
        (allocator.free, freed),
        (allocator.fork, freed),
        (allocator.mark_cached, freed),
        (allocator.mark_cached, held),
        (allocator.is_cached, 3),
        *((method, block) for method in (allocator.free, allocator.fork, allocator.ref_count) for block in (-1, 3)),
    ]
    for method, block in misuses:
        with pytest.raises(ValueError, match=f"block {block} "):
            method(block)
    allocator.check_integrity([], pins=[held])
    assert (allocator.num_free_blocks, allocator.num_cached_blocks) == (2, 1)


def test_an_empty_pool_is_refused() -> None:
    """A pool has at least one block."""
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockAllocator(0)


def test_only_a_private_unpublished_block_is_writable() -> None:
    """A second reference or a publication makes a block read-only, and so does giving it back."""
    allocator = BlockAllocator(2)
    shared, published = allocator.allocate(), allocator.allocate()
    assert allocator.is_writable(shared)
    allocator.fork(shared)
    assert not allocator.is_writable(shared)
    allocator.mark_cached(published)
    assert not allocator.is_writable(published)
    allocator.free(published)
    assert not allocator.is_writable(published)


def test_plain_free_blocks_go_before_cached_ones() -> None:
    """As long as a block without published contents is free, nothing is evicted."""
    allocator = BlockAllocator(4)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    cached = cached_blocks(allocator, 2)
    assert allocator.num_free_blocks == 4
    assert {allocator.allocate(), allocator.allocate()}.isdisjoint(cached)
    assert not evicted
    assert allocator.allocate() == cached[0]
    assert evicted == [cached[0]]


def test_eviction_takes_the_least_recently_used_first() -> None:
    """A hit makes a block recently used once it is released again; the evicted block is an ordinary one afterwards."""
    allocator = BlockAllocator(3)
    first, second, third = cached_blocks(allocator, 3)
    allocator.fork(first)
    allocator.free(first)
    assert [allocator.allocate() for _ in range(3)] == [second, third, first]
    assert allocator.num_cached_blocks == 0
    assert allocator.is_writable(second)


def test_a_hit_that_is_held_is_never_evicted() -> None:
    """Forking an evictable block takes it out of the free ones."""
    allocator = BlockAllocator(2)
    kept, other = cached_blocks(allocator, 2)
    allocator.fork(kept)
    assert allocator.num_free_blocks == 1
    assert allocator.allocate() == other
    with pytest.raises(OutOfBlocks):
        allocator.allocate()


def test_a_shortage_counts_an_evictable_hit_once() -> None:
    """Evictable hits are not also free; hits that others hold cost nothing."""
    allocator = BlockAllocator(6)
    hits = cached_blocks(allocator, 4)
    held = [allocator.allocate(), allocator.allocate()]
    assert allocator.num_free_blocks == 4
    assert allocator.shortage(4, hits) <= 0
    assert allocator.shortage(5, hits) > 0
    assert allocator.shortage(4) <= 0
    allocator.free(held[0])
    assert allocator.shortage(5, hits) <= 0
    allocator.fork(hits[0])
    assert allocator.shortage(5, hits) <= 0
    assert allocator.shortage(6, hits) > 0


@pytest.mark.parametrize(
    ("damage", "block"),
    [
        (lambda a: a._ref_counts.__setitem__(1, 2), 1),
        (lambda a: a._free.append(0), 0),
        (lambda a: a._free.remove(3), 3),
        (lambda a: a._free.append(3), 3),
        (lambda a: a._cached.add(3), 3),
        (lambda a: a._cached.remove(2), 2),
        (lambda a: a._evictable.pop(2), 2),
        (lambda a: a._evictable.__setitem__(1, None), 1),
        (lambda a: a._free.append(4), 4),
    ],
)
def test_check_integrity_names_the_damaged_block(damage: Callable[[BlockAllocator], object], block: int) -> None:
    """Each way in which the books can be wrong is an AssertionError with the block's number."""
    allocator = BlockAllocator(4)
    table = SimpleNamespace(blocks=[allocator.allocate(), allocator.allocate()])
    evictable = allocator.allocate()
    allocator.mark_cached(evictable)
    allocator.free(evictable)
    assert (table.blocks, evictable) == ([0, 1], 2)
    allocator.check_integrity([table])
    damage(allocator)
    with pytest.raises(AssertionError, match=f"block {block} "):
        allocator.check_integrity([table])


def test_check_integrity_sees_leaks_and_lost_references() -> None:
    """A block that nobody names, or that more name than its count says, is found; pins count as holders."""
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    with pytest.raises(AssertionError, match=f"block {block} has ref_count 1, but is held by 0"):
        allocator.check_integrity([])
    with pytest.raises(AssertionError, match=f"block {block} has ref_count 1, but is held by 2"):
        allocator.check_integrity([SimpleNamespace(blocks=[block])], pins=[block])
    allocator.check_integrity([SimpleNamespace(blocks=[])], pins=[block])
