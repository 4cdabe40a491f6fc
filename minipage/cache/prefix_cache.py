"""Finding blocks by the tokens that they hold, so that a prompt's known beginning is not computed again.

PagedAttention (section 4.4) shares prefixes that are known in advance; here every full block that was computed can be
found again, under a key that is a hash chain:

    root        key = SHA-256(salt)
    block i     key = SHA-256(key of block i-1 + token ids of block i)

The key finds a block, the tokens decide: they are compared on every hit, so that no collision, met or made, lets one
sequence read another's K and V.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .block_allocator import BlockAllocator
from .block_table import RELEASED, BlockTable
from .chains import Chains, collect, rebuild
from .prefix import Prefix


def sha256(data: bytes) -> bytes:
    """SHA-256 (FIPS 180-4): the 32 bytes of the digest."""
    return hashlib.sha256(data).digest()


class PrefixCache:
    """The published blocks of an allocator, by prefix. They stay until the allocator needs them for something else.

    Requests with different salts share nothing. ``block_size`` must be that of the tables.
    """

    def __init__(
        self, allocator: BlockAllocator, block_size: int, hash_function: Callable[[bytes], bytes] = sha256
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._hash = hash_function
        self._blocks: dict[bytes, int] = {}  # key -> the block published under it
        self._prefixes: dict[int, Prefix] = {}  # published block -> what it holds
        self.num_published = 0  #: how often a block was published so far
        allocator.on_evict = self._forget

    def match(
        self, token_ids: Sequence[int], max_tokens: int, salt: str | None = None, *, gaps: bool = False
    ) -> list[int]:
        """The blocks of the longest published prefix of ``token_ids`` that has at most ``max_tokens`` tokens.

        With ``gaps`` it goes on behind a block that is not there, and has -1 in its place: layers with a window do not need
        all of them. It takes no references: fork the blocks, for a table to adopt, before anything else is allocated.
        """
        blocks = []
        prefix = self._root(salt)
        for _ in range(min(max_tokens, len(token_ids)) // self._block_size):
            prefix = self._extend(prefix, token_ids)
            block = self._blocks.get(prefix.key)
            if block is not None and self._prefixes[block].equals(prefix):
                prefix = self._prefixes[block]
                blocks.append(block)
            elif gaps:
                blocks.append(RELEASED)
            else:
                break
        return blocks

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_computed: int, salt: str | None = None) -> None:
        """Publish the full blocks of ``table`` among its first ``num_computed`` tokens, whose K and V must be computed.

        ``token_ids`` are the sequence's, from its first token on. The first to publish a prefix wins: an equal block of
        someone else stays private, unless nobody holds the first any more, whose place it then takes. ``table.prefix`` keeps
        what was seen, so each call hashes new full blocks only.
        """
        if num_computed > min(table.num_tokens, len(token_ids)):
            raise ValueError(
                f"num_computed must be at most the {table.num_tokens} slots of the table and the {len(token_ids)} "
                f"token ids, got {num_computed}"
            )
        prefix = table.prefix or self._root(salt)
        while (prefix.num_blocks + 1) * self._block_size <= num_computed:
            block, prefix = table.blocks[prefix.num_blocks], self._extend(prefix, token_ids)
            if block != RELEASED:
                prefix = self._publish(block, prefix)
        table.prefix = prefix

    def chains(self) -> tuple[Chains, list[int]]:
        """All that is published as plain data, and the blocks of its holders."""
        blocks = self._allocator.cached_blocks()
        blocks.sort(key=lambda block: self._prefixes[block].num_blocks)
        return collect(self._prefixes[block] for block in blocks), blocks

    @contextmanager
    def restoring(self, chains: Chains) -> Iterator[list[tuple[int, int]]]:
        """Publish blocks that were stored: yields pairs (i, block) for the caller to fill each block with what holder i held.

        As many as there is room for, evicting nothing, and none that is published already. Afterwards nobody holds them,
        and they are evicted tail first. Where filling them raises, nothing has changed.
        """
        restored: dict[bytes, tuple[int, int, Prefix]] = {}
        prefixes = rebuild(chains, self._root, self._child)
        for i, node in enumerate(chains.holders):
            prefix = prefixes[node]
            known = prefix.key in self._blocks or prefix.key in restored
            if not known and self._allocator.num_unused_blocks:
                restored[prefix.key] = i, self._allocator.allocate(), prefix
        try:
            yield [(i, block) for i, block, _ in restored.values()]
            for _, block, prefix in restored.values():
                self._publish(block, prefix)
        finally:
            for _, block, _ in reversed(restored.values()):
                self._allocator.free(block)

    def check_integrity(self) -> None:
        """Check the entries against the allocator. Raises AssertionError that names the block where they disagree."""
        for block in range(self._allocator.num_blocks):
            published, cached = block in self._prefixes, self._allocator.is_cached(block)
            if published != cached:
                raise AssertionError(f"block {block} is published: {published}, but marked as cached: {cached}")
            if published and self._blocks.get(self._prefixes[block].key) != block:
                raise AssertionError(f"block {block} is published, but its key does not find it")
        for block in self._blocks.values():
            if block not in self._prefixes:
                raise AssertionError(f"block {block} is found by a key, but was evicted")

    def _publish(self, block: int, prefix: Prefix) -> Prefix:
        winner = self._blocks.get(prefix.key)
        if winner is not None:
            if not self._prefixes[winner].equals(prefix):
                return prefix
            prefix = self._prefixes[winner]  # one chain for all who share it keeps comparisons short
            if self._allocator.ref_count(winner) > 0:
                return prefix
            self._allocator.discard(winner)
        self._allocator.mark_cached(block)
        self.num_published += 1
        self._blocks[prefix.key] = block
        self._prefixes[block] = prefix
        return prefix

    def _forget(self, block: int) -> None:
        del self._blocks[self._prefixes.pop(block).key]

    def _root(self, salt: str | None) -> Prefix:
        content = (salt or "").encode("utf-8", "surrogatepass")
        return Prefix(parent=None, content=content, key=self._hash(content), num_blocks=0)

    def _extend(self, prefix: Prefix, token_ids: Sequence[int]) -> Prefix:
        start = prefix.num_blocks * self._block_size
        return self._child(prefix, array("i", token_ids[start : start + self._block_size]).tobytes())

    def _child(self, prefix: Prefix, content: bytes) -> Prefix:
        return Prefix(prefix, content, self._hash(prefix.key + content), prefix.num_blocks + 1)
