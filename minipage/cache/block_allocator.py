"""Which blocks of the pool are in use: the reference counts of PagedAttention (Kwon et al. 2023, sections 4.2 and 4.4).

A block is in one of three states, and free + evictable + held = total at all times:

    held       ref_count >= 1: so many tables (and pins) name it
    evictable  ref_count == 0, but what it holds is published: a prefix hit may bring it back
    free       ref_count == 0, and what it holds is of no use

                      allocate                 last free, published
          +--------+ ----------> +--------+ ----------------------> +-----------+
          |  free  |             |  held  |                         | evictable |
          +--------+ <---------- +--------+ <---------------------- +-----------+
                      last free                fork (a prefix hit),
                                               allocate (evicts it, when none is free)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Protocol


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for; nothing was changed."""


class HasBlocks(Protocol):
    """Anything that holds one reference to each of ``blocks`` that is not negative: a block table."""

    @property
    def blocks(self) -> list[int]: ...


class BlockAllocator:
    """Hands out the block ids 0 .. num_blocks-1 and counts who holds them. Every operation on a block is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        #: Called with each block that is about to lose its published contents to a new owner.
        self.on_evict: Callable[[int], None] | None = None
        #: Called with each block whose contents nobody can reach any more: the last reference gone, and not published.
        self.on_discard: Callable[[int], None] | None = None
        self._ref_counts = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))  # a stack: the block freed last is the warmest
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._cached: set[int] = set()  # published, whether held or evictable

    # ---- questions -------------------------------------------------------------------------------------------------
    @property
    def num_free_blocks(self) -> int:
        """Blocks that :meth:`allocate` can hand out, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that :meth:`allocate` can hand out without evicting one."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold published contents, held or evictable."""
        return len(self._cached)

    def cached_blocks(self) -> list[int]:
        """The blocks that hold published contents: those that are held, then the evictable ones, last used first."""
        return [*sorted(self._cached.difference(self._evictable)), *reversed(self._evictable)]

    def ref_count(self, block: int) -> int:
        """How many tables and pins hold the block."""
        return self._ref_counts[self._known(block)]

    def is_cached(self, block: int) -> bool:
        """Whether the block's contents are published."""
        return self._known(block) in self._cached

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write into the block: nobody else sees it, by a table or by a prefix hit."""
        return self.ref_count(block) == 1 and block not in self._cached

    def shortage(self, num_blocks: int, hits: Collection[int] = ()) -> int:
        """How many blocks are missing for ``num_blocks`` to be had at once, the cached blocks ``hits`` among them; 0 or less:
        none.

        Until they are forked, evictable hits are among the free blocks as well: they are not counted as both.
        """
        evictable_hits = sum(self.ref_count(block) == 0 for block in hits)
        return num_blocks - len(hits) - (self.num_free_blocks - evictable_hits)

    # ---- references ------------------------------------------------------------------------------------------------
    def allocate(self) -> int:
        """A block with one reference and unspecified contents: a free one, else the least recently used evictable one.

        Raises OutOfBlocks if all blocks are held.
        """
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block = next(iter(self._evictable))
            self._evict(block)
        else:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are held")
        self._ref_counts[block] = 1
        return block

    def fork(self, block: int) -> int:
        """Add a reference to a block that is held or evictable, and return it. Raises ValueError if it is free."""
        if self.ref_count(block) == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free: only a held or a cached block can be forked")
            del self._evictable[block]
        self._ref_counts[block] += 1
        return block

    def free(self, block: int) -> None:
        """Drop a reference. At the last one the block is free, or evictable (as most recently used) if it is cached.

        Raises ValueError if nobody holds the block.
        """
        if self.ref_count(block) == 0:
            raise ValueError(f"block {block} is freed twice: nobody holds it")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._cached:
                self._evictable[block] = None
            else:
                self._free.append(block)
                if self.on_discard is not None:
                    self.on_discard(block)

    def mark_cached(self, block: int) -> None:
        """Note that a held block's contents are published: they stay as they are until :meth:`allocate` evicts them.

        Raises ValueError if nobody holds the block, or if it is published already.
        """
        if self.ref_count(block) == 0 or block in self._cached:
            raise ValueError(f"block {block} cannot be published: it must be held and not published yet")
        self._cached.add(block)

    def discard(self, block: int) -> None:
        """Give up what an evictable block holds: it is free. Raises ValueError if it is held, or free already."""
        if self._known(block) not in self._evictable:
            raise ValueError(f"block {block} cannot be discarded: it must be published and held by nobody")
        self._evict(block)
        self._free.append(block)

    def _evict(self, block: int) -> None:
        del self._evictable[block]
        self._cached.remove(block)
        if self.on_evict is not None:
            self.on_evict(block)
        if self.on_discard is not None:
            self.on_discard(block)

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not of this pool: its blocks are 0 .. {self.num_blocks - 1}")
        return block

    # ---- the books -------------------------------------------------------------------------------------------------
    def check_integrity(self, tables: Iterable[HasBlocks], pins: Iterable[int] = ()) -> None:
        """Check the counts against all who hold blocks: tables, and ``pins`` with an entry for each other reference.

        Raises AssertionError that names the block where counts, tables, lists and cached marks disagree.
        """
        held = Counter(block for table in tables for block in table.blocks if block >= 0)
        held.update(pins)
        listed = Counter([*self._free, *self._evictable])
        for block in sorted({*range(self.num_blocks), *held, *listed, *self._cached}):
            if not 0 <= block < self.num_blocks:
                raise AssertionError(f"block {block} is not of this pool of {self.num_blocks}")
            count, cached = self._ref_counts[block], block in self._cached
            if count != held[block]:
                raise AssertionError(
                    f"block {block} has ref_count {count}, but is held by {held[block]} tables and pins"
                )
            if listed[block] != (count == 0):
                raise AssertionError(
                    f"block {block} has ref_count {count}, but is {listed[block]} times among the free"
                )
            if (block in self._evictable) != (count == 0 and cached):
                raise AssertionError(f"block {block} (ref_count {count}, cached: {cached}) is in the wrong list")
