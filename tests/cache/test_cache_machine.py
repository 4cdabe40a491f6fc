"""Tables, allocator and prefix cache beside a memory: every sequence reads back its own history, whatever was shared.

The K and V of a token depend on all tokens before it, so a slot of this memory holds the salt and the tokens up to and
with its own: sharing a block with the wrong neighbour cannot go unseen. A step is what it is in the engine: appends, forks
and frees in any order first, then the copies, then the tokens.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minipage.cache import BlockAllocator, BlockCopy, BlockTable, OutOfBlocks, Prefix, PrefixCache, copy_launches

Slot = tuple[str | None, tuple[int, ...]] | None  #: what a slot holds
#: Prompts begin like one of these, so that much of them is found in the cache.
STEMS = ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0])
SALTS = (None, "salt")
#: From no collision to nothing but collisions: hits are right under any hash.
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "one bit": lambda data: bytes([hashlib.sha256(data).digest()[0] & 1]),
    "last tokens": lambda data: data[-8:],
    "constant": lambda data: b"",
}


@dataclass(eq=False)
class Sequence:
    """A table, the tokens that it should read back, and how many of them are computed."""

    table: BlockTable
    tokens: list[int]
    salt: str | None
    num_computed: int

    def slot(self, position: int) -> Slot:
        """What the slot of a token holds once it is computed."""
        return self.salt, tuple(self.tokens[: position + 1])


def spell(prefix: Prefix) -> tuple[str | None, tuple[int, ...]]:
    """The salt and the tokens that a chain stands for."""
    tokens: list[int] = []
    while prefix.parent is not None:
        tokens[:0] = array("i", prefix.content)
        prefix = prefix.parent
    return prefix.content.decode() or None, tuple(tokens)


class World:
    """A pool, its memory, and a few sequences; each method does one thing to them and checks what it says."""

    def __init__(self, num_blocks: int, block_size: int, hash_function: Callable[[bytes], bytes]) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, block_size, hash_function)
        self.memory: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.sequences: list[Sequence] = []
        self.copies: list[BlockCopy] = []  # of this step, not made yet

    # ---- what happens ----------------------------------------------------------------------------------------------
    def admit(self, tokens: list[int], salt: str | None) -> None:
        """A prompt comes in with what is cached of it, exactly if its hits and its new blocks fit together."""
        hits = self.cache.match(tokens, len(tokens) - 1, salt)
        table = BlockTable(self.allocator, self.block_size)
        num_blocks = -(-len(tokens) // self.block_size)
        not_held = {block for block in range(self.allocator.num_blocks) if self.allocator.ref_count(block) == 0}
        fits = num_blocks - len(hits) <= len(not_held - set(hits))
        assert (self.allocator.shortage(num_blocks, hits) <= 0) == fits
        if fits:
            table.adopt([self.allocator.fork(block) for block in hits])
            assert table.append(len(tokens) - table.num_tokens) == []
            self.sequences.append(Sequence(table, list(tokens), salt, len(hits) * self.block_size))

    def append(self, sequence: Sequence, tokens: list[int]) -> None:
        """A sequence grows by what fits; otherwise nothing at all has changed, and the last sequence gives way."""
        before, free = self.books(), self.allocator.num_free_blocks
        needed = sequence.table.blocks_needed(len(tokens))
        if needed > free:
            with pytest.raises(OutOfBlocks):
                sequence.table.append(len(tokens))
            assert self.books() == before
            self.free(self.sequences[-1])
            return
        copies = sequence.table.append(len(tokens))
        given_back = sum(self.allocator.ref_count(copy.src) == 0 for copy in copies)
        assert self.allocator.num_free_blocks == free - needed + given_back
        self.copies += copies
        sequence.tokens += tokens

    def decode(self, tokens: list[int]) -> None:
        """Each sequence that is computed grows by one token, in turn; the last ones give way where blocks run out."""
        ready = [sequence for sequence in self.sequences if sequence.num_computed == len(sequence.tokens)]
        for sequence, token in zip(ready, tokens, strict=False):
            while sequence in self.sequences and sequence.num_computed == len(sequence.tokens):
                self.append(sequence, [token])

    def fork(self, parent: Sequence, num_tokens: int) -> None:
        """A sequence whose tokens are all computed is continued in a second way, from anywhere; no block is taken."""
        if parent.num_computed == len(parent.tokens):
            free = self.allocator.num_free_blocks
            child = parent.table.fork(num_tokens)
            assert self.allocator.num_free_blocks == free
            self.sequences.append(Sequence(child, parent.tokens[:num_tokens], parent.salt, num_tokens))

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence forgets its end, computed or not."""
        sequence.table.truncate(num_tokens)
        del sequence.tokens[num_tokens:]
        sequence.num_computed = min(sequence.num_computed, num_tokens)

    def free(self, sequence: Sequence) -> None:
        """A sequence ends, or is preempted, at any point of a step."""
        self.sequences.remove(sequence)
        sequence.table.free()

    def step(self, budget: int) -> None:
        """The copies are made, then tokens are written, each into a block that nobody else sees, then published."""
        expected = self.memory_after_copies()
        for launch in copy_launches(self.copies):
            targets = [copy.dst for copy in launch]
            assert len(set(targets)) == len(targets)
            assert not set(targets) & {copy.src for copy in launch}
            for copy in reversed(launch):
                self.memory[copy.dst] = list(self.memory[copy.src])
        assert self.memory == expected
        self.copies = []
        for sequence in self.sequences:
            for position in range(sequence.num_computed, min(sequence.num_computed + budget, len(sequence.tokens))):
                block = sequence.table.blocks[position // self.block_size]
                assert self.allocator.is_writable(block)
                self.memory[block][position % self.block_size] = sequence.slot(position)
                sequence.num_computed += 1
        for sequence in self.sequences:
            self.cache.publish(sequence.table, sequence.tokens, sequence.num_computed, sequence.salt)

    # ---- what always holds -----------------------------------------------------------------------------------------
    def check(self) -> None:
        """The books are whole, tables read their own history, and published blocks hold what they are found by."""
        self.allocator.check_integrity([sequence.table for sequence in self.sequences])
        self.cache.check_integrity()
        memory = self.memory_after_copies()
        for sequence in self.sequences:
            table = sequence.table
            assert table.num_tokens == len(sequence.tokens)
            assert len(table.blocks) == -(-len(sequence.tokens) // self.block_size)
            for position in range(sequence.num_computed):
                block = table.blocks[position // self.block_size]
                assert memory[block][position % self.block_size] == sequence.slot(position)
        for block, prefix in self.cache._prefixes.items():
            salt, tokens = spell(prefix)
            first = len(tokens) - self.block_size
            assert memory[block] == [(salt, tokens[: first + i + 1]) for i in range(self.block_size)]
            assert (block in self.cache.match(tokens, len(tokens), salt)) == self.is_reachable(prefix)

    def free_everything(self) -> None:
        """When all sequences have ended, the whole pool is free."""
        for sequence in list(self.sequences):
            self.free(sequence)
        self.check()
        assert self.allocator.num_free_blocks == self.allocator.num_blocks

    def is_reachable(self, prefix: Prefix) -> bool:
        """Whether all of a chain is published now, whatever the order in which its blocks came and went."""
        published = {spell(other) for other in self.cache._prefixes.values()}
        salt, tokens = spell(prefix)
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return all((salt, tokens[:end]) in published for end in ends)

    def memory_after_copies(self) -> list[list[Slot]]:
        """The memory as the tokens of this step will find it: copies made one after the other."""
        memory = [list(block) for block in self.memory]
        for copy in self.copies:
            memory[copy.dst] = list(memory[copy.src])
        return memory

    def books(self) -> Any:
        """Everything that a refused call must leave as it was, the order of eviction included."""
        allocator, cache = self.allocator, self.cache
        return (
            [list(allocator._ref_counts), list(allocator._free), list(allocator._evictable), set(allocator._cached)],
            [dict(cache._blocks), dict(cache._prefixes)],
            [(list(s.table.blocks), s.table.num_tokens, s.table.prefix) for s in self.sequences],
        )


def run(world: World, rng: random.Random, num_operations: int) -> None:
    """Do ``num_operations`` random things to a world, and check it after each."""

    def tokens(at_most: int) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randint(0, at_most))]

    for _ in range(num_operations):
        operation = rng.choices(
            (world.admit, world.append, world.decode, world.fork, world.truncate, world.free, world.step),
            (2, 1, 3, 4, 1, 1, 4),
        )[0]
        sequence = rng.choice(world.sequences) if world.sequences else None
        if operation == world.step:
            world.step(rng.choice((1, 3, 20)))
        elif operation == world.decode:
            world.decode([rng.randrange(2) for _ in world.sequences])
        elif operation == world.admit or sequence is None:
            world.admit([*rng.choice(STEMS)[: rng.randint(0, 12)], *tokens(3)], rng.choice(SALTS))
        elif operation == world.append:
            world.append(sequence, tokens(6))
        elif operation == world.free:
            world.free(sequence)
        else:
            length = len(sequence.tokens)
            operation(sequence, rng.choice((length, rng.randint(0, length))))
        world.check()


@pytest.mark.parametrize("hash_name", sorted(HASHES))
@pytest.mark.parametrize(("num_blocks", "block_size"), [(4, 4), (8, 1), (12, 3), (16, 2), (24, 4)])
def test_random_steps_leave_every_history_intact(num_blocks: int, block_size: int, hash_name: str) -> None:
    """Any order of admissions, growth, forks, cuts and ends, over small pools, under good and bad hashes."""
    for seed in range(10):
        world = World(num_blocks, block_size, HASHES[hash_name])
        run(world, random.Random(f"{num_blocks} {block_size} {hash_name} {seed}"), 100)
        world.free_everything()


class CacheMachine(RuleBasedStateMachine):
    """The same, for the shortest sequence of calls that breaks a rule."""

    prompts = st.builds(
        lambda stem, shared, rest: [*stem[:shared], *rest],
        st.sampled_from(STEMS),
        st.integers(0, 12),
        st.lists(st.integers(0, 1), max_size=3),
    )
    indices = st.integers(0, 5)

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        hash_name=st.sampled_from(sorted(HASHES)),
        prompts=st.lists(prompts, min_size=1, max_size=3),
    )
    def start(self, num_blocks: int, block_size: int, hash_name: str, prompts: list[list[int]]) -> None:
        self.world = World(num_blocks, block_size, HASHES[hash_name])
        for prompt in prompts:
            self.world.admit(prompt, None)

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def admit(self, tokens: list[int], salt: str | None) -> None:
        self.world.admit(tokens, salt)

    @rule(index=indices, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, index: int, tokens: list[int]) -> None:
        if sequence := self.pick(index):
            self.world.append(sequence, tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=5, max_size=5))
    def decode(self, tokens: list[int]) -> None:
        self.world.decode(tokens)

    @rule(index=indices, num_tokens=st.integers(0, 15))
    def fork(self, index: int, num_tokens: int) -> None:
        if parent := self.pick(index):
            self.world.fork(parent, min(num_tokens, len(parent.tokens)))

    @rule(index=indices, num_tokens=st.integers(0, 15))
    def truncate(self, index: int, num_tokens: int) -> None:
        if sequence := self.pick(index):
            self.world.truncate(sequence, min(num_tokens, len(sequence.tokens)))

    @rule(index=indices)
    def free(self, index: int) -> None:
        if sequence := self.pick(index):
            self.world.free(sequence)

    @rule(budget=st.integers(1, 12))
    def step(self, budget: int) -> None:
        self.world.step(budget)

    def pick(self, index: int) -> Sequence | None:
        sequences = self.world.sequences
        return sequences[index % len(sequences)] if sequences else None

    @invariant()
    def check(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.free_everything()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
