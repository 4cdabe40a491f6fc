"""What a prefix cache holds as plain data: written down in one pool and restored in another, it finds the same blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.cache import BlockAllocator, BlockTable, Chains, PrefixCache

SIZE = 2
Contents = dict[int, tuple[str | None, tuple[int, ...]]]  # block -> what was computed there

stories = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from([None, "a", "b\ud83d"])), max_size=8
)


class Pool:
    """An allocator with its prefix cache, and what each block holds."""

    def __init__(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, SIZE)
        self.contents: Contents = {}

    def compute(self, tokens: Sequence[int], salt: str | None = None) -> BlockTable | None:
        """A table of these tokens, computed and published; None where there is no room."""
        table = BlockTable(self.allocator, SIZE)
        table.adopt([self.allocator.fork(block) for block in self.cache.match(tokens, len(tokens), salt)])
        first = len(table.blocks)
        if table.blocks_needed(len(tokens) - table.num_tokens) > self.allocator.num_free_blocks:
            table.free()
            return None
        table.append(len(tokens) - table.num_tokens)
        for i, block in enumerate(table.blocks[first:], first):
            self.contents[block] = salt, tuple(tokens[: (i + 1) * SIZE])
        self.cache.publish(table, tokens, len(tokens), salt)
        return table

    def restore(self, other: Pool) -> int:
        """Take over what another pool has published; how many blocks that is."""
        chains, blocks = other.cache.chains()
        with self.cache.restoring(chains) as pairs:
            for i, block in pairs:
                self.contents[block] = other.contents[blocks[i]]
        return len(pairs)

    def found(self, tokens: Sequence[int], salt: str | None) -> int:
        """How many blocks of a prompt are found, all of which hold what they should."""
        blocks = self.cache.match(tokens, len(tokens), salt)
        for i, block in enumerate(blocks):
            assert self.contents[block] == (salt, tuple(tokens[: (i + 1) * SIZE]))
        return len(blocks)

    def check(self, tables: Sequence[BlockTable] = ()) -> None:
        self.allocator.check_integrity(tables)
        self.cache.check_integrity()


@given(first=stories, second=stories, num_blocks=st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_restored_prefixes_are_found(
    first: list[tuple[list[int], str | None]], second: list[tuple[list[int], str | None]], num_blocks: int
) -> None:
    """Whatever both pools have seen: nothing is evicted, what is found is right, and with room all is found."""
    source, target = Pool(20), Pool(num_blocks)
    for pool, story in ((source, first), (target, second)):
        for tokens, salt in story:
            table = pool.compute(tokens, salt)
            if table is not None:
                table.free()
    known = [target.found(tokens, salt) for tokens, salt in second]
    cached, unused = target.allocator.num_cached_blocks, target.allocator.num_unused_blocks
    restored = target.restore(source)
    target.check()
    assert target.allocator.num_cached_blocks == cached + restored
    assert target.allocator.num_free_blocks == num_blocks
    assert all(target.found(tokens, salt) >= before for (tokens, salt), before in zip(second, known, strict=True))
    for tokens, salt in first:
        assert target.found(tokens, salt) >= source.found(tokens, salt) or restored == unused
    assert target.restore(source) == 0 or restored == unused


def test_heads_come_first_and_stay_longest() -> None:
    """With room for a few blocks the heads of chains are restored; under pressure their tails are evicted first."""
    source, target = Pool(8), Pool(3)
    for tokens in ([1] * 8, [0] * 4):
        table = source.compute(tokens)
        assert table is not None
        table.free()
    assert target.restore(source) == 3
    assert [target.found([1] * 8, None), target.found([0] * 4, None)] in ([2, 1], [1, 2])
    target.allocator.allocate()
    assert [target.found([1] * 8, None), target.found([0] * 4, None)] == [1, 1]


def test_held_blocks_are_written_down_and_not_touched() -> None:
    """What running sequences share is part of the chains; their tables and counts stay as they are."""
    source = Pool(8)
    table = source.compute([1, 2, 3, 4, 5])
    assert table is not None
    chains, blocks = source.cache.chains()
    assert blocks == table.blocks[:2]
    assert chains == Chains([""], [-1, 0], [array("i", [1, 2]).tobytes(), array("i", [3, 4]).tobytes()], [0, 1])
    source.check([table])
    assert source.restore(source) == 0
    source.check([table])


def test_what_leads_to_a_block_is_written_down_without_it() -> None:
    """A block whose head was evicted keeps its place, and is found again once the head is there."""
    source, target = Pool(2), Pool(4)
    table = source.compute([1, 2, 3, 4])
    assert table is not None
    source.allocator.free(table.blocks[0])  # as a window does
    source.allocator.allocate()
    chains, blocks = source.cache.chains()
    assert (chains.parents, chains.holders, blocks) == ([-1, 0], [1], [table.blocks[1]])
    assert target.restore(source) == 1
    assert target.found([1, 2, 3, 4], None) == 0
    assert target.compute([1, 2]) is not None
    assert target.found([1, 2, 3, 4], None) == 2


def test_failure_to_fill_changes_nothing() -> None:
    """Where the contents cannot be had, no block is published or lost."""
    source, target = Pool(4), Pool(4)
    assert source.compute([1, 2, 3, 4]) is not None
    with pytest.raises(OSError, match="disk"), target.cache.restoring(source.cache.chains()[0]) as pairs:
        assert len(pairs) == 2
        raise OSError("disk")
    target.check()
    assert (target.allocator.num_unused_blocks, target.allocator.num_cached_blocks) == (4, 0)
    assert target.found([1, 2], None) == 0


def test_twice_the_same_is_restored_once() -> None:
    """Chains that nobody vouches for may name a prefix twice; it takes one block, and none is lost."""
    once = array("i", [1, 2]).tobytes()
    target = Pool(4)
    with target.cache.restoring(Chains(["", ""], [-1, -1, -2], [once] * 3, [0, 0, 1, 2])) as pairs:
        assert len(pairs) == 1
    target.check()
    assert (target.allocator.num_unused_blocks, target.allocator.num_cached_blocks) == (3, 1)
