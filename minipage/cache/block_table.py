"""A sequence's view of the pool: logical block i of the sequence is entry i of its table (PagedAttention, section 4.2).

    tokens   | t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 .. .. |      num_tokens = 10, block_size = 4
    blocks   |      7      |      2      |      5      |      only the last block may be partly filled

Tables share blocks after :meth:`BlockTable.fork` and through the prefix cache. A block that others can see is not written:
:meth:`BlockTable.append` replaces it with a copy first (copy-on-write, section 4.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .block_allocator import BlockAllocator, OutOfBlocks
from .prefix import Prefix

RELEASED = -1  #: the entry of a block that a sliding window has left behind


class BlockCopy(NamedTuple):
    """Block ``dst`` is to become a copy of block ``src``.

    The copies of a step are right if they are made in the order of issue and before any token of the step is written,
    whatever becomes of their blocks in the meantime, so nothing needs to be pinned. For when a copy is issued, ``src`` is
    shared or published, and nothing is written there. Should all let go of it within the step and it get a new owner,
    then what that owner puts there, by a later copy or by a token, comes after this copy has read it. The same holds for
    a ``dst`` that is given back within the step. :func:`copy_launches` keeps the order where it matters.
    """

    src: int
    dst: int


def copy_launches(copies: Iterable[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Split copies, in the order of issue, into launches whose copies may run at the same time.

    That is one launch, unless a block that a copy reads or writes was given back and taken again by a later copy.
    """
    launch: list[BlockCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if copy.src in written or copy.dst in written or copy.dst in read:
            yield launch
            launch, read, written = [], set(), set()
        launch.append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    if launch:
        yield launch


class BlockTable:
    """The blocks of one sequence. ``blocks`` and ``num_tokens`` are to be read; the methods change them."""

    def __init__(self, allocator: BlockAllocator, block_size: int, window: int = 0, sinks: int = 0) -> None:
        """With a ``window`` W a token sees itself and the W-1 before it, and the first ``sinks`` tokens (0: all of them)."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.blocks: list[int] = []
        self.num_tokens = 0  #: slots claimed, whether their K and V are computed or not
        #: How often entries were replaced or taken away: while it stays the same, ``blocks`` only gets longer.
        self.num_changes = 0
        self.prefix: Prefix | None = None  #: the leading blocks that the prefix cache has seen; kept by the cache
        self._allocator = allocator
        self._block_size = block_size
        self._window = window
        self._sinks = sinks
        self._num_rolled = 0  # leading blocks that roll() has looked at

    def blocks_needed(self, num_tokens: int) -> int:
        """How many blocks ``append(num_tokens)`` takes from the pool, the copy of a shared last block included."""
        return self._num_blocks(self.num_tokens + num_tokens) - len(self.blocks) + self.must_copy(num_tokens)

    def append(self, num_tokens: int) -> list[BlockCopy]:
        """Claim slots for ``num_tokens`` more tokens, and return the copies to be made before they are written.

        There is at most one: where the new tokens begin inside a block that others can see, by a table or by the prefix
        cache, the table gives up its reference to it for a fresh block. The last holder of an unpublished block writes
        in place.

        All or nothing: raises OutOfBlocks if blocks are short, and has then changed and evicted nothing.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        must_copy, length = self.must_copy(num_tokens), self._num_blocks(self.num_tokens + num_tokens)
        needed, free = length - len(self.blocks) + must_copy, self._allocator.num_free_blocks
        if needed > free:
            raise OutOfBlocks(f"{needed} blocks are needed and {free} are free")
        copies = []
        if must_copy:
            copy = BlockCopy(src=self.blocks[-1], dst=self._allocator.allocate())
            self._allocator.free(copy.src)
            self.blocks[-1] = copy.dst
            self.num_changes += 1
            copies.append(copy)
        self.num_tokens += num_tokens
        while len(self.blocks) < length:
            self.blocks.append(self._allocator.allocate())
        return copies

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin an empty table with full blocks (prefix hits); the caller's references to them become the table's."""
        if self.blocks:
            raise ValueError(f"only an empty table can adopt blocks, this one has {len(self.blocks)}")
        self.blocks = list(blocks)
        self.num_tokens = len(self.blocks) * self._block_size

    def roll(self, num_tokens: int) -> None:
        """Release the blocks that no token behind the first ``num_tokens`` can see (the rolling KV cache): their entries
        become RELEASED.

        At most ceil(window / block_size) + 1 blocks of these tokens are held afterwards, besides those of the sinks.
        """
        if not self._window:
            return
        first_seen = max(0, num_tokens - self._window + 1) // self._block_size
        for index in range(self._num_rolled, first_seen):
            if index * self._block_size >= self._sinks and self.blocks[index] != RELEASED:
                self._allocator.free(self.blocks[index])
                self.blocks[index] = RELEASED
                self.num_changes += 1
        self._num_rolled = max(self._num_rolled, first_seen)

    def fork(self, num_tokens: int | None = None) -> BlockTable:
        """A table that shares the blocks of the first ``num_tokens`` tokens (None: all). It takes no block of the pool.

        The K and V of all slots that this table has claimed must be computed: a shared block is not written any more.
        """
        num_tokens = self._at_most_held(self.num_tokens if num_tokens is None else num_tokens)
        child = BlockTable(self._allocator, self._block_size, self._window, self._sinks)
        blocks = self.blocks[: self._num_blocks(num_tokens)]
        child.blocks = [block if block == RELEASED else self._allocator.fork(block) for block in blocks]
        child._num_rolled = min(self._num_rolled, len(blocks))
        child.num_tokens = num_tokens
        child.prefix = self._prefix_within(num_tokens)
        return child

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens, and give the blocks beyond them back, the last one first."""
        self.num_tokens = self._at_most_held(num_tokens)
        self.prefix = self._prefix_within(num_tokens)
        while len(self.blocks) > self._num_blocks(num_tokens):
            block = self.blocks.pop()
            self.num_changes += 1
            if block != RELEASED:
                self._allocator.free(block)
        self._num_rolled = min(self._num_rolled, len(self.blocks))

    def free(self) -> None:
        """Give all blocks back, the last one first: so chains of cached blocks are evicted from their ends."""
        self.truncate(0)
        self.prefix = None

    def must_copy(self, num_tokens: int) -> bool:
        """Whether ``append(num_tokens)`` begins inside a block that others can see."""
        inside_a_block = num_tokens > 0 and self.num_tokens % self._block_size > 0
        return inside_a_block and not self._allocator.is_writable(self.blocks[-1])

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _at_most_held(self, num_tokens: int) -> int:
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens must be 0 .. {self.num_tokens}, the tokens of the table, got {num_tokens}")
        return num_tokens

    def _prefix_within(self, num_tokens: int) -> Prefix | None:
        prefix = self.prefix
        while prefix is not None and prefix.num_blocks * self._block_size > num_tokens:
            prefix = prefix.parent
        return prefix
