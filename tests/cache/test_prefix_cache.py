"""The prefix cache: what is found, what is not, and who wins."""

from __future__ import annotations

import pytest
from helpers.prefix_pool import BLOCK_SIZE, Pool

from minipage.cache import BlockTable


# ---- hits ------------------------------------------------------------------------------------------------------------
def test_the_longest_published_prefix_is_found() -> None:
    """Whole blocks of equal tokens from the start on are found, and nothing after the first difference."""
    pool = Pool(8)
    table, _ = pool.start(list(range(12)))
    assert pool.cache.match(list(range(12)), 12) == table.blocks
    assert pool.cache.match([*range(8), 99, 9, 10, 11], 12) == table.blocks[:2]
    assert pool.cache.match([0, 1, 2, 99, *range(4, 12)], 12) == []
    assert pool.cache.match(list(range(4, 12)), 8) == []
    assert pool.cache.match([], 12) == []


@pytest.mark.parametrize(
    ("max_tokens", "num_hits"), [(12, 3), (11, 2), (8, 2), (7, 1), (3, 0), (0, 0), (-1, 0), (99, 3)]
)
def test_hits_stay_within_max_tokens(max_tokens: int, num_hits: int) -> None:
    """The caller decides how much may be found: all but the last token of a prompt, as a rule."""
    pool = Pool(8)
    table, _ = pool.start(list(range(12)))
    assert pool.cache.match(list(range(12)), max_tokens) == table.blocks[:num_hits]


def test_match_takes_no_references() -> None:
    """Asking changes nothing, neither counts nor the order of eviction."""
    pool = Pool(3)
    pool.run([1, 2, 3, 4])
    pool.run([5, 6, 7, 8])
    pool.run([9, 10, 11, 12])
    pool.cache.match([1, 2, 3, 4], 4)
    assert pool.allocator.num_free_blocks == 3
    pool.run([13])
    assert pool.cache.match([1, 2, 3, 4], 4) == []


def test_only_full_computed_blocks_are_published() -> None:
    """A block whose last token is still to be computed cannot be found."""
    pool = Pool(8)
    table = BlockTable(pool.allocator, BLOCK_SIZE)
    table.append(12)
    tokens = list(range(12))
    for num_computed in range(13):
        pool.cache.publish(table, tokens, num_computed)
        assert pool.cache.match(tokens, 12) == table.blocks[: num_computed // BLOCK_SIZE]


def test_publishing_more_than_there_is_is_refused() -> None:
    """num_computed is bounded by the slots of the table and by the token ids."""
    pool = Pool(8)
    table = BlockTable(pool.allocator, BLOCK_SIZE)
    table.append(8)
    for tokens, num_computed in ((range(12), 12), (range(7), 8)):
        with pytest.raises(ValueError, match=f"num_computed must be at most .* got {num_computed}"):
            pool.cache.publish(table, list(tokens), num_computed)
    assert pool.allocator.num_cached_blocks == 0


def test_each_block_is_hashed_once_as_a_sequence_grows() -> None:
    """Publishing after every token costs one hash a block, whatever the length of the chain."""
    hashed: list[bytes] = []
    pool = Pool(32, hash_function=lambda data: (hashed.append(data), data[-16:])[1])
    table = BlockTable(pool.allocator, BLOCK_SIZE)
    tokens = list(range(100))
    for num_tokens in range(1, 101):
        table.append(1)
        pool.cache.publish(table, tokens[:num_tokens], num_tokens)
    assert len(hashed) == 1 + 25
    child = table.fork()
    pool.cache.publish(child, tokens, 100)
    child.truncate(96)
    pool.cache.publish(child, tokens[:96], 96)
    assert len(hashed) == 1 + 25


def test_the_first_to_publish_wins() -> None:
    """An equal block of a second sequence stays private, and is a plain free block when that sequence ends."""
    pool = Pool(8)
    tokens = list(range(8))
    tables = [BlockTable(pool.allocator, BLOCK_SIZE) for _ in range(2)]
    for table in tables:
        table.append(8)
    pool.cache.publish(tables[0], tokens, 4)
    pool.cache.publish(tables[1], tokens, 8)
    pool.cache.publish(tables[0], tokens, 8)
    assert pool.cache.match(tokens, 8) == [tables[0].blocks[0], tables[1].blocks[1]]
    assert pool.allocator.num_cached_blocks == 2
    assert tables[0].prefix is tables[1].prefix  # one chain in memory, so that comparing it is O(1)
    private = tables[1].blocks[0]
    tables[1].free()
    assert not pool.allocator.is_cached(private)


def test_a_held_block_takes_the_place_of_one_that_nobody_holds() -> None:
    """Published late, as after a swap, a sequence's blocks replace equal evictable ones, which are free: one copy is enough."""
    pool = Pool(8)
    tokens = list(range(8))
    late = BlockTable(pool.allocator, BLOCK_SIZE)
    late.append(8)
    early, _ = pool.start(tokens)
    prefix = early.prefix
    early.free()
    assert pool.allocator.num_unused_blocks == 4
    pool.cache.publish(late, tokens, 8)
    pool.cache.check_integrity()
    assert pool.cache.match(tokens, 8) == late.blocks
    assert late.prefix is prefix
    assert (pool.allocator.num_unused_blocks, pool.allocator.num_cached_blocks) == (6, 2)
    late.free()
    assert pool.run([*range(8), 9]) == 8


def test_a_fork_goes_on_where_its_parent_had_published() -> None:
    """Children publish their own blocks under the chain of what they share."""
    pool = Pool(8)
    parent, _ = pool.start(list(range(8)))
    child = parent.fork()
    for table, token in ((parent, 50), (child, 60)):
        table.append(4)
        pool.cache.publish(table, [*range(8), *[token] * 4], 12)
    for table, token in ((parent, 50), (child, 60)):
        assert pool.cache.match([*range(8), *[token] * 4], 12) == table.blocks


def test_a_fork_from_the_middle_publishes_its_own_tokens() -> None:
    """A child that shares only part of what its parent published goes on under that part's name."""
    pool = Pool(8)
    parent, _ = pool.start(list(range(8)))
    child = parent.fork(4)
    tokens = [0, 1, 2, 3, *[60] * 8]
    child.append(8)
    pool.cache.publish(child, tokens, 12)
    assert pool.cache.match(tokens, 12) == child.blocks
    assert pool.cache.match([*range(8), *[60] * 4], 12) == parent.blocks


def test_tokens_after_a_truncation_are_published_as_they_are() -> None:
    """What a table held before it was cut back does not reach the names of what it holds now."""
    pool = Pool(8)
    table, _ = pool.start(list(range(10)))
    table.truncate(3)
    assert len(table.append(6)) == 1
    tokens = [0, 1, 2, 77, 88, 88, 88, 88, 88]
    pool.cache.publish(table, tokens, 9)
    pool.cache.check_integrity()
    assert pool.cache.match(tokens, 9) == table.blocks[:2]
    assert len(pool.cache.match(list(range(10)), 10)) == 2


def test_ids_that_differ_only_in_high_bits_differ() -> None:
    """Token ids are compared as whole 32-bit numbers."""
    pool = Pool(8)
    pool.run([1, 2, 3, 4, 0])
    assert pool.cache.match([1, 2, 3, 4 + 65536], 4) == []
    assert pool.cache.match([1 + (1 << 24), 2, 3, 4], 4) == []


# ---- salts -----------------------------------------------------------------------------------------------------------
def test_salts_share_nothing() -> None:
    """A prefix is found under the salt that it was published with, and under no other; no salt is the empty one."""
    pool = Pool(16)
    tokens = list(range(9))
    assert [pool.run(tokens, salt) for salt in ("a", "b", None, "a", "b", "")] == [0, 0, 0, 8, 8, 8]
    assert pool.run(tokens, "\ud83d") == 0


def test_a_freed_table_can_change_its_salt() -> None:
    """What a table was published under before it was freed does not bind it afterwards."""
    pool = Pool(8)
    table, _ = pool.start([1, 2, 3, 4], "a")
    table.free()
    table.append(4)
    pool.cache.publish(table, [5, 6, 7, 8], 4, "b")
    assert pool.cache.match([5, 6, 7, 8], 4, "b") == table.blocks
    assert pool.cache.match([5, 6, 7, 8], 4, "a") == []


def test_a_salt_cannot_stand_for_tokens() -> None:
    """A salt that spells a known key and its tokens leads to no block of that chain, though the hashes are the same."""
    pool = Pool(16, hash_function=lambda data: data)
    pool.run([0x41414141] * 9)
    assert pool.run([0x41414141] * 5, "A" * 16) == 0


# ---- collisions ------------------------------------------------------------------------------------------------------
def test_a_collision_is_not_a_hit() -> None:
    """Where all hashes are equal, different tokens are still different: the later block stays unpublished."""
    pool = Pool(16, hash_function=lambda data: b"same")
    first, second = list(range(8)), list(range(100, 108))
    assert [pool.run(tokens) for tokens in ([*first, 0], [*second, 0], [*first, 0], [*second, 0])] == [0, 0, 4, 0]
    assert pool.allocator.num_cached_blocks == 1


def test_a_collision_of_parents_is_not_a_hit() -> None:
    """Equal tokens after different beginnings are different, even if key and parent's key are the same."""
    pool = Pool(4, hash_function=lambda data: data[-16:])  # the last block alone, so chains collide after their heads
    with_a, _ = pool.start([1, 1, 1, 1, 5, 5, 5, 5])
    with_b, _ = pool.start([2, 2, 2, 2, 5, 5, 5, 5])
    assert pool.cache.match([1, 1, 1, 1, 5, 5, 5, 5], 8) == with_a.blocks
    assert pool.cache.match([2, 2, 2, 2, 5, 5, 5, 5], 8) == with_b.blocks[:1]


def test_a_chain_is_found_again_after_its_head_was_recomputed() -> None:
    """A block outlives its evicted parent, and can be found once equal tokens are published in the parent's place."""
    pool = Pool(4)
    tokens = list(range(8))
    first, _ = pool.start(tokens[:4])
    second = BlockTable(pool.allocator, BLOCK_SIZE)
    second.append(8)
    pool.cache.publish(second, tokens, 8)
    first.free()
    others = [pool.start([60])[0], pool.start([70])[0]]  # takes the free block, then evicts the head
    assert pool.cache.match(tokens, 8) == []
    others[0].free()
    first, _ = pool.start(tokens[:4])
    assert pool.cache.match(tokens, 8) == [first.blocks[0], second.blocks[1]]
    pool.allocator.check_integrity([first, second, others[1]])
