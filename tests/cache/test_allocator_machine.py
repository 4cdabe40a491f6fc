"""Long random runs of the allocator beside a plain model."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minipage.cache import BlockAllocator, OutOfBlocks


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


def test_100_000_random_operations_agree_with_the_model() -> None:
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
