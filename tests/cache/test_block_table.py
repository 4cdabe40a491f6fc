"""Block tables: growth, sharing, copy-on-write, and that a refused call leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipage.cache import BlockAllocator, BlockCopy, BlockTable, OutOfBlocks, PrefixCache, copy_launches


def pool(num_blocks: int, *lengths: int, block_size: int = 4) -> tuple[BlockAllocator, list[BlockTable]]:
    """An allocator and a table for each length."""
    allocator = BlockAllocator(num_blocks)
    tables = [BlockTable(allocator, block_size) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        table.append(length)
    return allocator, tables


# ---- growth ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("length", "more", "needed"), [(0, 0, 0), (0, 4, 1), (3, 1, 0), (4, 1, 1), (5, 8, 2), (6, 2, 0)]
)
def test_growth_takes_a_block_per_block_size_tokens(length: int, more: int, needed: int) -> None:
    """A table of n tokens has ceil(n / block_size) blocks, and blocks_needed says beforehand what append takes."""
    allocator, [table] = pool(8, length)
    free = allocator.num_free_blocks
    assert table.blocks_needed(more) == needed
    assert table.append(more) == []
    assert free - allocator.num_free_blocks == needed
    assert (table.num_tokens, len(table.blocks)) == (length + more, -(-(length + more) // 4))


def test_growth_that_does_not_fit_changes_nothing() -> None:
    """A short append raises OutOfBlocks and takes none of the blocks that are there."""
    allocator, [table] = pool(4, 6)
    blocks = list(table.blocks)
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free"):
        table.append(11)
    assert (table.blocks, table.num_tokens, allocator.num_free_blocks) == (blocks, 6, 2)
    table.append(10)
    assert allocator.num_free_blocks == 0


def test_growth_that_does_not_fit_evicts_nothing() -> None:
    """Cached blocks survive an append that is refused, in their order; one that fits evicts only what it needs."""
    allocator, [first, second] = pool(5, 12, 5)
    cache = PrefixCache(allocator, 4)
    tokens = list(range(12))
    cache.publish(first, tokens, 12)
    cached = list(first.blocks)
    first.free()
    with pytest.raises(OutOfBlocks):
        second.append(16)
    assert cache.match(tokens, 12) == cached
    second.append(4)
    assert cache.match(tokens, 12) == cached[:2]
    allocator.check_integrity([second])


def test_bad_arguments_are_refused() -> None:
    """Sizes that make no sense are ValueErrors that name the argument."""
    allocator, [table] = pool(4, 5)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockTable(allocator, 0)
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        table.append(-1)
    for method in (table.truncate, table.fork):
        for num_tokens in (-1, 6):
            with pytest.raises(ValueError, match=rf"num_tokens must be 0 \.\. 5, .* got {num_tokens}"):
                method(num_tokens)
    with pytest.raises(ValueError, match="only an empty table can adopt"):
        table.adopt([0])
    allocator.check_integrity([table])


OPERATIONS = st.tuples(
    st.sampled_from(["append", "append", "truncate", "roll", "fork"]), st.integers(0, 1), st.integers(0, 9)
)


@pytest.mark.parametrize("window", [0, 5])
@given(operations=st.lists(OPERATIONS, max_size=30))
def test_entries_stay_as_long_as_num_changes_does(window: int, operations: list[tuple[str, int, int]]) -> None:
    """Whatever is done to a table: while num_changes is the same, what was read of it is still what it begins with."""
    allocator = BlockAllocator(12)
    tables = [BlockTable(allocator, 4, window) for _ in range(2)]
    for name, which, amount in operations:
        seen = [(table, table.num_changes, list(table.blocks)) for table in tables]
        table = tables[which]
        if name == "append" and table.blocks_needed(amount) <= allocator.num_free_blocks:
            table.append(amount)
        elif name == "truncate":
            kept = min(amount, table.num_tokens)
            if kept == 0 or table.blocks[(kept - 1) // 4] >= 0:  # nobody goes back to before the window
                table.truncate(kept)
        elif name == "roll":
            table.roll(table.num_tokens)
        elif name == "fork":
            tables[1 - which].free()
            tables[1 - which] = table.fork()
        for each, num_changes, blocks in seen:
            assert each.num_changes > num_changes or each.blocks[: len(blocks)] == blocks


# ---- giving back -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kept", range(10))
def test_truncate_gives_back_the_blocks_beyond(kept: int) -> None:
    """What is left holds the first tokens, in the same blocks."""
    allocator, [table] = pool(4, 9)
    blocks = list(table.blocks)
    table.truncate(kept)
    assert table.blocks == blocks[: -(-kept // 4)]
    assert (table.num_tokens, allocator.num_free_blocks) == (kept, 4 - len(table.blocks))


def test_free_gives_everything_back_once() -> None:
    """A freed table is empty: freeing it again does nothing, and it can be used anew."""
    allocator, [table] = pool(4, 9)
    table.free()
    table.free()
    assert (table.blocks, table.num_tokens, allocator.num_free_blocks) == ([], 0, 4)
    table.append(1)
    allocator.check_integrity([table])


def test_adopted_blocks_belong_to_the_table() -> None:
    """A table takes over references that its caller took, and gives them back."""
    allocator, [table, other] = pool(4, 8, 0)
    other.adopt([allocator.fork(block) for block in table.blocks])
    assert (other.blocks, other.num_tokens) == (table.blocks, 8)
    allocator.check_integrity([table, other])
    table.free()
    other.free()
    assert allocator.num_free_blocks == 4


# ---- sharing ---------------------------------------------------------------------------------------------------------
def test_fork_shares_and_the_last_holder_writes_in_place() -> None:
    """Of n sequences that share a partly filled block, n-1 copy it and the last one keeps it (section 4.4)."""
    allocator, [parent] = pool(8, 6)
    tables = [parent, parent.fork(), parent.fork()]
    assert allocator.num_free_blocks == 6
    full, partly = parent.blocks
    assert [table.blocks_needed(1) for table in tables] == [1, 1, 1]
    copies = [copy for table in tables for copy in table.append(1)]
    assert [copy.src for copy in copies] == [partly, partly]
    assert [copy.dst for copy in copies] == [tables[0].blocks[1], tables[1].blocks[1]]
    assert tables[2].blocks == [full, partly]
    assert {allocator.ref_count(table.blocks[1]) for table in tables} == {1}
    assert allocator.ref_count(full) == 3
    allocator.check_integrity(tables)


def test_a_full_last_block_stays_shared() -> None:
    """Tokens that begin a new block copy nothing, however many share the blocks before it."""
    allocator, [parent] = pool(8, 8)
    child = parent.fork()
    assert parent.append(1) == [] == child.append(1)
    assert parent.blocks[:2] == child.blocks[:2]
    assert parent.blocks[2] != child.blocks[2]
    allocator.check_integrity([parent, child])


def test_appending_nothing_copies_nothing() -> None:
    """append(0) leaves a shared block shared."""
    _, [parent] = pool(8, 6)
    child = parent.fork()
    assert child.append(0) == []
    assert child.blocks == parent.blocks


def test_fork_of_fewer_tokens_shares_only_their_blocks() -> None:
    """The child's last block is shared even where the parent's tokens go on in it: the next token copies it."""
    allocator, [parent] = pool(8, 11)
    child = parent.fork(5)
    assert child.blocks == parent.blocks[:2]
    assert child.append(1) == [BlockCopy(parent.blocks[1], child.blocks[1])]
    allocator.check_integrity([parent, child])


def test_copy_that_does_not_fit_changes_nothing() -> None:
    """A copy-on-write needs a block: without one nobody loses a reference."""
    allocator, [parent] = pool(2, 6)
    child = parent.fork()
    with pytest.raises(OutOfBlocks):
        child.append(1)
    assert child.blocks == parent.blocks
    assert child.num_tokens == 6
    allocator.check_integrity([parent, child])
    parent.free()
    assert child.append(1) == []


def test_growth_counts_the_copy_and_the_new_blocks_together() -> None:
    """Where there is room for the copy but not for the blocks after it, nothing is copied either."""
    allocator, [parent] = pool(4, 6)
    child = parent.fork()
    assert child.blocks_needed(7) == 3
    with pytest.raises(OutOfBlocks):
        child.append(7)
    allocator.check_integrity([parent, child])
    assert allocator.num_free_blocks == 2
    assert len(child.append(6)) == 1
    assert allocator.num_free_blocks == 0


def test_a_published_block_is_not_written_by_its_only_holder() -> None:
    """A table cut back into a published block copies it, and the block can still be found."""
    allocator, [table] = pool(4, 8)
    cache = PrefixCache(allocator, 4)
    tokens = list(range(8))
    cache.publish(table, tokens, 8)
    first, second = table.blocks
    table.truncate(6)
    assert table.blocks_needed(1) == 1
    assert table.append(1) == [BlockCopy(second, table.blocks[1])]
    assert table.blocks[1] != second
    assert cache.match(tokens, 8) == [first, second]
    cache.publish(table, [0, 1, 2, 3, 4, 5, 60], 7)
    table.append(1)
    cache.publish(table, [0, 1, 2, 3, 4, 5, 60, 70], 8)
    assert cache.match([0, 1, 2, 3, 4, 5, 60, 70], 8) == table.blocks
    allocator.check_integrity([table])
    cache.check_integrity()


# ---- the copies of a step --------------------------------------------------------------------------------------------
def apply(copies: list[BlockCopy], memory: list[str]) -> list[str]:
    """Memory after all launches; the copies of a launch read before any of them writes, as if all ran at once."""
    for launch in copy_launches(copies):
        read = [memory[copy.src] for copy in launch]
        for copy, content in zip(launch, read, strict=True):
            memory[copy.dst] = content
    return memory


def test_copies_of_a_fork_are_one_launch() -> None:
    """Copies that share a source, or touch different blocks, need no order."""
    copies = [BlockCopy(0, 4), BlockCopy(0, 5), BlockCopy(1, 6)]
    assert list(copy_launches(copies)) == [copies]
    assert list(copy_launches([])) == []


@pytest.mark.parametrize(
    ("copies", "memory"),
    [
        ([(0, 1), (2, 0)], "cac"),  # the source of the first was given back and is the target of the second
        ([(0, 1), (1, 2)], "aaa"),  # the target of the first is the source of the second
        ([(0, 1), (2, 1)], "acc"),  # the target of the first was given back and is the target of the second
        ([(0, 1), (2, 0), (1, 2)], "caa"),
    ],
)
def test_copies_that_touch_each_other_keep_their_order(copies: list[Any], memory: str) -> None:
    """A copy sees what the copies before it have made, and nothing of those after it."""
    copies = [BlockCopy(*copy) for copy in copies]
    launches = list(copy_launches(copies))
    assert [copy for launch in launches for copy in launch] == copies
    for launch in launches:
        targets = [copy.dst for copy in launch]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.src for copy in launch}
    assert "".join(apply(copies, list("abc"))) == memory


def test_order_costs_no_more_launches_than_it_must() -> None:
    """After a copy that had to wait, the next ones share its launch, though they touch blocks of the launch before."""
    copies = [BlockCopy(*copy) for copy in ((0, 1), (2, 3), (4, 0), (1, 5), (6, 2))]
    assert list(copy_launches(copies)) == [copies[:2], copies[2:]]


def test_a_source_may_be_reused_within_the_step() -> None:
    """A copy is right though its source was evicted, within the same step, to be the target of the next copy."""
    allocator, [first, second] = pool(4, 4, 2)
    cache = PrefixCache(allocator, 4)
    cache.publish(first, [1, 2, 3, 4], 4)
    first.truncate(3)
    third = second.fork()
    memory = ["-"] * 4
    memory[first.blocks[0]], memory[second.blocks[0]] = "first", "second"
    copies = first.append(1)
    blocker = BlockTable(allocator, 4)
    blocker.append(4)  # takes the last plain free block: only the source of the copy is left
    copies += second.append(1)
    assert copies[1].dst == copies[0].src
    assert cache.match([1, 2, 3, 4], 4) == []
    assert len(list(copy_launches(copies))) == 2
    memory = apply(copies, memory)
    assert [memory[table.blocks[0]] for table in (first, second, third)] == ["first", "second", "second"]
    allocator.check_integrity([first, second, third, blocker])
