"""All KV blocks of an engine: what a sequence holds for every group of layers, claimed, shared, swapped and released together.

Layers that see alike form groups of equal size, so that a block of any group takes the same memory and all groups share one
pool. A sequence has a block table in each group. Those of layers without a window keep all blocks; those of layers with a
window keep the last few (the rolling KV cache):

                        group 0: all tokens       group 1: window
    tables of a         | 3 | 8 | 1 | 5 |         | - | - | 4 | 2 |
    sequence

What is done to a sequence is done in all its tables or in none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .block_allocator import BlockAllocator
from .block_table import RELEASED, BlockCopy, BlockTable
from .prefix_cache import PrefixCache


class Group(NamedTuple):
    """What the layers of a group see."""

    window: int = 0  #: a token sees itself and the window-1 before it; 0: all
    sinks: int = 0  #: with a window: the first tokens that stay visible

    def first_seen(self, position: int) -> int:
        """The first token, behind the sinks, that the token at ``position`` sees."""
        return max(0, position - self.window + 1) if self.window else 0


class Swap(NamedTuple):
    """Block ``src`` of the device pool goes to block ``dst`` of the host pool, or the other way round."""

    src: int
    dst: int


class SwappedTable(NamedTuple):
    """A table whose blocks are in the host pool."""

    blocks: list[int]
    num_tokens: int


class Tables:
    """One sequence's block tables, one a group, with the same number of tokens in all."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.swapped: tuple[SwappedTable, ...] = ()  #: one a group while the sequence is in the host pool

    @property
    def num_tokens(self) -> int:
        """Slots claimed; all of them are computed between steps."""
        return self.tables[0].num_tokens

    @property
    def blocks(self) -> list[int]:
        """All entries of all tables."""
        return [block for table in self.tables for block in table.blocks]


class BlockManager:
    """One pool of blocks for all groups. Pure accounting: it returns the copies and swaps that the storage has to make."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[Group] = (Group(),),
        *,
        caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.allocator = BlockAllocator(num_blocks)
        self.host = BlockAllocator(num_host_blocks) if num_host_blocks else None
        self.prefixes = PrefixCache(self.allocator, block_size) if caching else None
        windows = [group.window for group in self.groups if group.window]
        #: Tokens to compute at once at most, so that what windows hold meanwhile stays small; None: any number.
        self.longest_chunk = min(windows) if windows else None

    # ---- how many blocks ---------------------------------------------------------------------------------------------
    def longest_total(self, num_prompt_tokens: int, n: int) -> int | None:
        """The most tokens, prompt and output, that each of ``n`` sequences of a prompt can reach alone in the pool.

        Whole blocks of the prompt are shared; the last token of a sequence needs no slot, since nothing follows it. 0 where
        not even the prompt fits, None where there is no end (all layers have a window that the pool can hold).
        """
        rolling = sum(self._most_rolling(group) for group in self.groups if group.window) * n
        growing = [group for group in self.groups if not group.window]
        pool = self.allocator.num_blocks - rolling
        if rolling and not growing and pool >= 0:
            return None
        held = self._reach(num_prompt_tokens, n, pool, len(growing)) if pool > 0 else 0
        return max(held, self._reach(num_prompt_tokens, n, self.allocator.num_blocks, len(self.groups)))

    def _reach(self, num_prompt_tokens: int, n: int, pool: int, num_groups: int) -> int:
        """The same for groups that keep all their blocks."""
        size, pool = self.block_size, pool // num_groups
        shared = num_prompt_tokens // size
        longest = (shared + (pool - shared) // n) * size + 1
        if longest > num_prompt_tokens:
            return longest
        return num_prompt_tokens + 1 if -(-num_prompt_tokens // size) <= pool else 0

    def blocks_known(self, num_prompt_tokens: int, lengths: Sequence[int]) -> int:
        """Blocks that hold sequences of these lengths at most, which share whole blocks of their prompt.

        Both bounds that :meth:`longest_total` goes by are taken, so that what it lets in can always be admitted again.
        """
        shared = num_prompt_tokens // self.block_size
        held = [-(-length // self.block_size) for length in lengths]
        total = 0
        for group in self.groups:
            rolling = self._most_rolling(group)
            apart = sum(min(blocks, rolling) for blocks in held)
            together = min(shared, rolling) + sum(min(blocks - shared, rolling) for blocks in held)
            total += min(apart, together)
        return total

    def _most_rolling(self, group: Group) -> int:
        if not group.window:
            return 1 << 62
        size, chunk = self.block_size, self.longest_chunk or 1
        return -(-group.sinks // size) + -(-(group.window + chunk - 1) // size) + 1

    # ---- tables ------------------------------------------------------------------------------------------------------
    def new_tables(self) -> Tables:
        """Empty tables for a sequence."""
        return Tables([BlockTable(self.allocator, self.block_size, *group) for group in self.groups])

    def can_append(self, wanted: Sequence[tuple[Tables, int]]) -> bool:
        """Whether :meth:`append` will do for all of these together, each with its number of tokens."""
        needed = sum([table.blocks_needed(count) for tables, count in wanted for table in tables.tables])
        free = self.allocator.num_free_blocks
        return needed <= free or needed - self._kept(wanted) <= free

    def _kept(self, wanted: Sequence[tuple[Tables, int]]) -> int:
        """How many of the copies that each of these needs by itself are not made: the last to copy a block may keep it."""
        kept = 0
        to_copy: dict[int, int] = {}  # tables that have not copied a shared last block yet
        for table, num_tokens in ((table, num_tokens) for tables, num_tokens in wanted for table in tables.tables):
            if table.must_copy(num_tokens) and not self.allocator.is_cached(table.blocks[-1]):
                last = table.blocks[-1]
                to_copy[last] = to_copy.get(last, self.allocator.ref_count(last)) - 1
                kept += to_copy[last] == 0
        return kept

    def append(self, tables: Tables, num_tokens: int) -> list[BlockCopy]:
        """Claim slots for ``num_tokens`` more tokens, which :meth:`can_append` allows; returns the copies to make first."""
        return [copy for table in tables.tables for copy in table.append(num_tokens)]

    def fork(self, tables: Tables) -> Tables:
        """Tables that share all blocks."""
        return Tables([table.fork() for table in tables.tables])

    def free(self, tables: Tables) -> None:
        """Give back all blocks, on the device or in the host pool."""
        for table in tables.tables:
            table.free()
        for swapped in tables.swapped:
            self._free_swapped(swapped)
        tables.swapped = ()

    def computed(self, tables: Tables, token_ids: Sequence[int], num_computed: int, salt: str | None) -> None:
        """So many tokens are computed for good: publish the full blocks, then release what no later token sees."""
        for index, table in enumerate(tables.tables):
            if self.prefixes is not None:
                self.prefixes.publish(table, token_ids, num_computed, self._salt(index, salt))
            table.roll(num_computed)

    def truncate(self, tables: Tables, num_tokens: int) -> None:
        """Give back all slots but those of the first ``num_tokens`` tokens, and the blocks beyond them."""
        for table in tables.tables:
            table.truncate(num_tokens)

    @property
    def supply(self) -> int:
        """What makes a :meth:`shortage` less: free blocks, and, since they may be hits, blocks published so far.

        As long as no request is admitted, a shortage falls by no more than this rises; rarely by more where layers have windows,
        whose missing block hides others that are there. It rises to any shortage by the time that all others have ended.
        """
        return self.allocator.num_free_blocks + (self.prefixes.num_published if self.prefixes is not None else 0)

    # ---- prefix hits -------------------------------------------------------------------------------------------------
    def match(self, token_ids: Sequence[int], max_tokens: int, salt: str | None) -> list[list[int]]:
        """Blocks of the longest prefix that is cached in every group as far as the next token sees it; none are claimed yet.

        A list a group, of equal lengths, with RELEASED for what is not seen.
        """
        if self.prefixes is None:
            return self.no_hits()
        found: list[list[int]] = [[] for _ in self.groups]
        limit = max_tokens
        for index in sorted(range(len(self.groups)), key=lambda index: self.groups[index].window > 0):
            # Groups that need whole prefixes come first: they bound how far the others look.
            has_window = self.groups[index].window > 0
            found[index] = self.prefixes.match(token_ids, limit, self._salt(index, salt), gaps=has_window)
            limit = min(limit, len(found[index]) * self.block_size)
        longest = limit // self.block_size
        # Groups without a window have all blocks up to the limit.
        with_gaps = [(group, blocks) for group, blocks in zip(self.groups, found, strict=True) if group.window]
        while longest and not all(self._covers(group, blocks, longest) for group, blocks in with_gaps):
            longest -= 1
        return [self._seen_of(group, blocks, longest) for group, blocks in zip(self.groups, found, strict=True)]

    def no_hits(self) -> list[list[int]]:
        """What :meth:`match` gives where nothing is cached."""
        return [[] for _ in self.groups]

    def shortage(self, num_blocks: int, hits: Sequence[list[int]]) -> int:
        """How many blocks are missing for so many to be had at once, where ``hits`` are among them; 0 or less: none."""
        return self.allocator.shortage(num_blocks, [block for blocks in hits for block in blocks if block != RELEASED])

    def adopt(self, tables: Tables, hits: Sequence[list[int]]) -> None:
        """Begin empty tables with the blocks that :meth:`match` found."""
        for table, blocks in zip(tables.tables, hits, strict=True):
            table.adopt([block if block == RELEASED else self.allocator.fork(block) for block in blocks])

    def _covers(self, group: Group, blocks: list[int], num_blocks: int) -> bool:
        return all(blocks[index] != RELEASED for index in self._seen(group, num_blocks))

    def _seen_of(self, group: Group, blocks: list[int], num_blocks: int) -> list[int]:
        seen = [RELEASED] * num_blocks
        for index in self._seen(group, num_blocks):
            seen[index] = blocks[index]
        return seen

    def _seen(self, group: Group, num_blocks: int) -> Iterator[int]:
        """Which of ``num_blocks`` full blocks the token after them sees, the last ones first: these are missing most often."""
        size = self.block_size
        first = group.first_seen(num_blocks * size) // size
        yield from reversed(range(first, num_blocks))
        yield from range(min(first, -(-group.sinks // size)))

    @staticmethod
    def _salt(group: int, salt: str | None) -> str:
        """Groups share the pool but not their contents."""
        return f"{group}/{salt or ''}"

    # ---- swapping ----------------------------------------------------------------------------------------------------
    def swap_out(self, sequences: Sequence[Tables]) -> list[Swap] | None:
        """Move all blocks of these sequences to the host pool, shared ones once; None, with nothing changed, if it is short."""
        distinct = {block for tables in sequences for block in tables.blocks} - {RELEASED}
        if self.host is None or len(distinct) > self.host.num_free_blocks:
            return None
        homes: dict[int, int] = {}
        for tables in sequences:
            tables.swapped = tuple(
                SwappedTable(_move(table.blocks, homes, self.host), table.num_tokens) for table in tables.tables
            )
            for table in tables.tables:
                table.free()
        return [Swap(src, dst) for src, dst in homes.items()]

    def swap_in(self, sequences: Sequence[Tables]) -> list[Swap]:
        """Bring swapped sequences back; there must be room for all their distinct blocks."""
        homes: dict[int, int] = {}
        for tables in sequences:
            for table, swapped in zip(tables.tables, tables.swapped, strict=True):
                table.adopt(_move(swapped.blocks, homes, self.allocator))
                table.truncate(swapped.num_tokens)
        for tables in sequences:
            for swapped in tables.swapped:
                self._free_swapped(swapped)
            tables.swapped = ()
        return [Swap(src, dst) for src, dst in homes.items()]

    def _free_swapped(self, swapped: SwappedTable) -> None:
        assert self.host is not None
        for block in swapped.blocks:
            if block != RELEASED:
                self.host.free(block)

    # ---- the books ---------------------------------------------------------------------------------------------------
    def check_integrity(self, sequences: Sequence[Tables]) -> None:
        """Raise AssertionError, naming the block, where counts, tables, lists and cached marks disagree in either pool."""
        self.allocator.check_integrity([table for tables in sequences for table in tables.tables])
        if self.prefixes is not None:
            self.prefixes.check_integrity()
        if self.host is not None:
            self.host.check_integrity([swapped for tables in sequences for swapped in tables.swapped])


def _move(blocks: Sequence[int], homes: dict[int, int], pool: BlockAllocator) -> list[int]:
    """Blocks in another pool; ``homes`` notes where each distinct block goes."""
    moved = []
    for block in blocks:
        if block == RELEASED:
            moved.append(RELEASED)
        elif block in homes:
            moved.append(pool.fork(homes[block]))
        else:
            homes[block] = pool.allocate()
            moved.append(homes[block])
    return moved
