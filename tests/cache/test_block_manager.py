"""All tables of a sequence together: prefixes that are cached in every group of layers as far as it is seen."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from minipage.cache import RELEASED, BlockManager, Group

BLOCK = 4


def cached(groups: Sequence[Group], gaps: Sequence[set[int]]) -> tuple[BlockManager, list[int]]:
    """A manager with one prompt published, and for each group the leading blocks of it that were evicted since."""
    manager = BlockManager(256, BLOCK, groups)
    length = BLOCK * 20
    prompt = list(range(length))
    for index, lost in enumerate(gaps):
        table = manager.new_tables().tables[index]
        table.append(length)
        manager.prefixes.publish(table, prompt, length, manager._salt(index, None))
        blocks = list(table.blocks)
        table.free()
        for block in lost:
            manager.allocator.discard(blocks[block])
    return manager, prompt


def longest_by_hand(groups: Sequence[Group], gaps: Sequence[set[int]], most: int) -> int:
    """The most blocks whose next token sees none that was lost."""
    for count in range(most // BLOCK, 0, -1):
        tokens = count * BLOCK
        seen = [
            {i // BLOCK for i in range(tokens) if not group.window or i > tokens - group.window or i < group.sinks}
            for group in groups
        ]
        if not any(each & lost for each, lost in zip(seen, gaps, strict=True)):
            return count
    return 0


@pytest.mark.parametrize(
    "groups",
    [(Group(9),), (Group(1),), (Group(8, 5),), (Group(0), Group(7)), (Group(12), Group(0), Group(5, 2))],
    ids=str,
)
def test_the_longest_prefix_that_is_seen_whole(groups: tuple[Group, ...]) -> None:
    """Whatever was evicted, what is found is the longest prefix of which the next token misses nothing."""
    draws = random.Random(1)
    for _ in range(60):
        gaps = [{i for i in range(20) if draws.random() < draws.choice((0.0, 0.1, 0.5))} for _ in groups]
        manager, prompt = cached(groups, gaps)
        most = draws.randrange(1, len(prompt) + 1)
        hits = manager.match(prompt, most, None)
        assert {len(blocks) for blocks in hits} == {longest_by_hand(groups, gaps, most)}
        tables = manager.new_tables()
        manager.adopt(tables, hits)
        for group, table in zip(groups, tables.tables, strict=True):
            first = max(0, table.num_tokens - group.window + 1) if group.window else 0
            for index, block in enumerate(table.blocks):
                assert (block != RELEASED) == (index * BLOCK < group.sinks or (index + 1) * BLOCK > first)
        manager.free(tables)
        manager.check_integrity([])


@pytest.mark.parametrize("groups", [(Group(4096),), (Group(0), Group(4096, 4))], ids=str)
def test_a_prompt_far_longer_than_a_window_is_looked_for_once(
    groups: tuple[Group, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for the cached prefix of a prompt asks once for each of its blocks what is seen: not for each pair of them."""
    asked: list[int] = []
    first_seen = Group.first_seen
    monkeypatch.setattr(
        Group, "first_seen", lambda group, position: asked.append(position) or first_seen(group, position)
    )
    manager = BlockManager(512, 16, groups)
    prompt = list(range(16 * 512))
    table = manager.new_tables().tables[0]
    if len(groups) > 1:  # the layers without a window have all of it
        table.append(len(prompt))
        manager.prefixes.publish(table, prompt, len(prompt), manager._salt(0, None))
    assert manager.match(prompt, len(prompt) - 1, None) == [[]] * len(groups)
    assert len(asked) <= 512 + len(groups)
