"""The allocator's rules, and long random runs of it beside a plain model."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minipage.cache import BlockAllocator, OutOfBlocks


def cached_blocks(allocator: BlockAllocator, count: int) -> list[int]:
    """``count`` evictable blocks, least recently used first."""
    blocks = [allocator.allocate() for _ in range(count)]
    for block in blocks:
        allocator.mark_cached(block)
    for block in blocks:
        allocator.free(block)
    return blocks


# ---- rules -----------------------------------------------------------------------------------------------------------
def test_a_pool_hands_out_each_block_once_and_then_raises():
    """All blocks of a pool can be held at once, each by one holder; one more is OutOfBlocks and changes nothing."""
    allocator = BlockAllocator(3)
    assert sorted(allocator.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocks, match="3"):
        allocator.allocate()
    assert allocator.num_free_blocks == 0
    allocator.check_integrity([], pins=[0, 1, 2])


def test_a_block_is_free_after_as_many_frees_as_references():
    """A block with two references survives one free."""
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    assert allocator.fork(block) == block
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free_blocks) == (1, 1)
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free_blocks) == (0, 2)


def test_misuse_names_the_block_and_changes_nothing():
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


def test_an_empty_pool_is_refused():
    """A pool has at least one block."""
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockAllocator(0)


def test_only_a_private_unpublished_block_is_writable():
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


def test_plain_free_blocks_go_before_cached_ones():
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


def test_eviction_takes_the_least_recently_used_first():
    """A hit makes a block recently used once it is released again; the evicted block is an ordinary one afterwards."""
    allocator = BlockAllocator(3)
    first, second, third = cached_blocks(allocator, 3)
    allocator.fork(first)
    allocator.free(first)
    assert [allocator.allocate() for _ in range(3)] == [second, third, first]
    assert allocator.num_cached_blocks == 0
    assert allocator.is_writable(second)


def test_a_hit_that_is_held_is_never_evicted():
    """Forking an evictable block takes it out of the free ones."""
    allocator = BlockAllocator(2)
    kept, other = cached_blocks(allocator, 2)
    allocator.fork(kept)
    assert allocator.num_free_blocks == 1
    assert allocator.allocate() == other
    with pytest.raises(OutOfBlocks):
        allocator.allocate()


def test_can_hold_counts_an_evictable_hit_once():
    """Evictable hits are not also free; hits that others hold cost nothing."""
    allocator = BlockAllocator(6)
    hits = cached_blocks(allocator, 4)
    held = [allocator.allocate(), allocator.allocate()]
    assert allocator.num_free_blocks == 4
    assert allocator.can_hold(4, hits)
    assert not allocator.can_hold(5, hits)
    assert allocator.can_hold(4)
    allocator.free(held[0])
    assert allocator.can_hold(5, hits)
    allocator.fork(hits[0])
    assert allocator.can_hold(5, hits)
    assert not allocator.can_hold(6, hits)


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
def test_check_integrity_names_the_damaged_block(damage, block):
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


def test_check_integrity_sees_leaks_and_lost_references():
    """A block that nobody names, or that more name than its count says, is found; pins count as holders."""
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    with pytest.raises(AssertionError, match=f"block {block} has ref_count 1, but is held by 0"):
        allocator.check_integrity([])
    with pytest.raises(AssertionError, match=f"block {block} has ref_count 1, but is held by 2"):
        allocator.check_integrity([SimpleNamespace(blocks=[block])], pins=[block])
    allocator.check_integrity([SimpleNamespace(blocks=[])], pins=[block])


# ---- beside a model --------------------------------------------------------------------------------------------------
class ModelledAllocator:
    """An allocator and what it should be: a set of free blocks, a list by last use, and a count for each held block."""

    def __init__(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.allocator.on_evict = lambda block: self.evicted.append(block)
        self.evicted: list[int] = []
        self.allocator.on_discard = lambda block: self.discarded.append(block)
        self.discarded: list[int] = []
        self.free_blocks = set(range(num_blocks))
        self.evictable: list[int] = []
        self.held: Counter[int] = Counter()
        self.cached: set[int] = set()

    def allocate(self) -> None:
        """A free block, or the least recently used evictable one and a call of on_evict, or OutOfBlocks."""
        self.evicted.clear()
        self.discarded.clear()
        if not self.free_blocks and not self.evictable:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate()
            return
        block = self.allocator.allocate()
        if self.free_blocks:
            self.free_blocks.remove(block)
            assert not self.evicted
            assert not self.discarded
        else:
            assert block == self.evictable.pop(0)
            assert self.evicted == self.discarded == [block]
            self.cached.remove(block)
        self.held[block] = 1

    def fork(self, block: int) -> None:
        """One more reference, unless the block is free or foreign."""
        if block not in self.held and block not in self.evictable:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.fork(block)
            return
        self.allocator.fork(block)
        if block in self.evictable:
            self.evictable.remove(block)
        self.held[block] += 1

    def free(self, block: int) -> None:
        """One reference less, unless nobody holds the block."""
        if block not in self.held:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.free(block)
            return
        self.discarded.clear()
        self.allocator.free(block)
        assert self.discarded == ([block] if self.held[block] == 1 and block not in self.cached else [])
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
            if block in self.cached:
                self.evictable.append(block)
            else:
                self.free_blocks.add(block)

    def mark_cached(self, block: int) -> None:
        """Published, unless it is already or nobody holds the block."""
        if block not in self.held or block in self.cached:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.mark_cached(block)
            return
        self.allocator.mark_cached(block)
        self.cached.add(block)

    def discard(self, block: int) -> None:
        """Free, and a call of both callbacks, unless the block is not evictable."""
        if block not in self.evictable:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.discard(block)
            return
        self.evicted.clear()
        self.discarded.clear()
        self.allocator.discard(block)
        assert self.evicted == self.discarded == [block]
        self.evictable.remove(block)
        self.cached.remove(block)
        self.free_blocks.add(block)

    def compare_counts(self) -> None:
        """The two agree in everything that can be asked."""
        assert self.allocator.num_free_blocks == len(self.free_blocks) + len(self.evictable)
        assert self.allocator.num_unused_blocks == len(self.free_blocks)
        assert self.allocator.num_cached_blocks == len(self.cached)
        held = sorted(self.cached - set(self.evictable))
        assert self.allocator.cached_blocks() == held + self.evictable[::-1]
        for block in range(self.allocator.num_blocks):
            assert self.allocator.ref_count(block) == self.held[block]

    def compare_books(self) -> None:
        """The allocator's own check agrees with the model's references."""
        self.allocator.check_integrity([], pins=self.held.elements())
        for block in range(self.allocator.num_blocks):
            assert self.allocator.is_cached(block) == (block in self.cached)
            assert self.allocator.is_writable(block) == (self.held[block] == 1 and block not in self.cached)

    def free_everything(self) -> None:
        """Once all references are dropped, the whole pool is free."""
        for block in list(self.held.elements()):
            self.free(block)
        self.compare_counts()
        self.compare_books()
        assert self.allocator.num_free_blocks == self.allocator.num_blocks


def test_100_000_random_operations_agree_with_the_model():
    """Allocate, fork, free, publish and misuse in any order: every count agrees after every one of 100,000 operations."""
    rng = random.Random(2)
    num_blocks = 12
    modelled = ModelledAllocator(num_blocks)
    operations = [modelled.fork, modelled.free, modelled.mark_cached, modelled.discard]
    for i in range(100_000):
        # The balance tips back and forth, so that the pool runs full and empty in turn.
        filling = i // 50 % 2 == 0
        choice = rng.random()
        if choice < (0.5 if filling else 0.2):
            modelled.allocate()
        else:
            operation = rng.choices(operations, (4, 4, 2, 1) if filling else (2, 16, 2, 1))[0]
            operation(rng.randrange(-1, num_blocks + 1))
        modelled.compare_counts()
        if i % 20 == 0:
            modelled.compare_books()
    modelled.free_everything()


class AllocatorMachine(RuleBasedStateMachine):
    """The same rules, for the shortest sequence of calls that breaks one."""

    @initialize(num_blocks=st.integers(1, 5))
    def start(self, num_blocks: int) -> None:
        self.modelled = ModelledAllocator(num_blocks)

    @rule()
    def allocate(self) -> None:
        self.modelled.allocate()

    @rule(block=st.integers(-1, 5))
    def fork(self, block: int) -> None:
        self.modelled.fork(block)

    @rule(block=st.integers(-1, 5))
    def free(self, block: int) -> None:
        self.modelled.free(block)

    @precondition(lambda self: self.modelled.held)
    @rule(data=st.data())
    def free_a_held_block(self, data: st.DataObject) -> None:
        self.modelled.free(data.draw(st.sampled_from(sorted(self.modelled.held))))

    @rule(block=st.integers(-1, 5))
    def mark_cached(self, block: int) -> None:
        self.modelled.mark_cached(block)

    @rule(block=st.integers(-1, 5))
    def discard(self, block: int) -> None:
        self.modelled.discard(block)

    @invariant()
    def agree(self) -> None:
        self.modelled.compare_counts()
        self.modelled.compare_books()

    def teardown(self) -> None:
        if hasattr(self, "modelled"):
            self.modelled.free_everything()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
