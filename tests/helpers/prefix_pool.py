"""A pool of blocks with a prefix cache, and requests that compute what they do not find."""

from __future__ import annotations

from typing import Any

from minipage.cache import BlockAllocator, BlockTable, PrefixCache

BLOCK_SIZE = 4


class Pool:
    """An allocator with a prefix cache, and requests that compute what they do not find."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, BLOCK_SIZE, **options)

    def start(self, tokens: list[int], salt: str | None = None) -> tuple[BlockTable, int]:
        """A table that holds all tokens, computed and published, and how many of them were found."""
        hits = self.cache.match(tokens, len(tokens) - 1, salt)
        table = BlockTable(self.allocator, BLOCK_SIZE)
        table.adopt([self.allocator.fork(block) for block in hits])
        table.append(len(tokens) - table.num_tokens)
        self.cache.publish(table, tokens, len(tokens), salt)
        self.cache.check_integrity()
        return table, len(hits) * BLOCK_SIZE

    def run(self, tokens: list[int], salt: str | None = None) -> int:
        """Start and finish a request; how many of its tokens were found."""
        table, found = self.start(tokens, salt)
        table.free()
        return found
