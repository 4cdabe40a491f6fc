"""MINIPAGE_DEBUG=1: an engine that checks the rules of its cache while it runs.

Of each write, that nobody but its one owner can see the block; after each step, that counts, tables and lists agree. Blocks
whose contents nobody can reach any more are filled with NaN, so that whoever reads them all the same shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..cache import BlockAllocator, BlockManager
from ..device.kv_cache import KVCache
from ..outputs import RequestOutput
from .engine import Engine

#: What makes a page NaN; in int8 all bytes are ones, so that the scales are.
_NAN = {"float32": np.nan, "float16": np.nan, "bfloat16": 0x7FC0, "int8": -1}


def is_enabled() -> bool:
    """Whether the environment asks for it; read when an engine is made."""
    return os.environ.get("MINIPAGE_DEBUG", "0") not in ("", "0")


class CheckedEngine(Engine):
    """An engine that checks its books after every step."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        self.check_integrity()
        return outputs


class CheckedKVCache(KVCache):
    """Pages that check what is written where. Raises AssertionError naming the block."""

    def __init__(self, blocks: BlockManager, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._blocks = blocks
        self._discarded = set(range(self.num_blocks))  # since the last step, or never used, and not overwritten since
        blocks.allocator.on_discard = self._discarded.add

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        self._overwrite([dst for _, dst in copies], "copied to")
        super().copy(copies)

    def swap_out(self, swaps: Sequence[tuple[int, int]]) -> None:
        if self._blocks.host is not None:
            _check_held(self._blocks.host, [dst for _, dst in swaps], "swapped to in the host pool")
        super().swap_out(swaps)

    def swap_in(self, swaps: Sequence[tuple[int, int]]) -> None:
        # Sequences that shared a block share it again, so it may have several owners; all of them are coming back.
        blocks = [dst for _, dst in swaps]
        _check_held(self._blocks.allocator, blocks, "swapped to")
        self._discarded.difference_update(blocks)
        super().swap_in(swaps)

    def write(self, layer: int, blocks: Sequence[int], key: np.ndarray, value: np.ndarray) -> None:
        self._overwrite(blocks, "loaded")
        super().write(layer, blocks, key, value)

    def expect_writes(self, slots: Sequence[np.ndarray]) -> None:
        """Check the blocks of the slots that a step's tokens go to. What it swaps and copies has been read by now, so that
        what was discarded can be poisoned.
        """
        super().expect_writes(slots)
        distinct, counts = np.unique(np.concatenate(slots), return_counts=True)
        blocks = distinct // self.shape.block_size
        self._check_exclusive(blocks.tolist(), "written by a token")
        if counts.max() > 1:
            raise AssertionError(f"block {blocks[counts.argmax()]} has two tokens written to one of its slots")
        if self._discarded:
            pages = self._device.array(np.array(sorted(self._discarded), dtype=np.int64))
            self.key[:, pages] = self.value[:, pages] = _NAN[self.shape.dtype]
            self._discarded.clear()

    def _overwrite(self, blocks: Sequence[int], how: str) -> None:
        self._check_exclusive(blocks, how)
        self._discarded.difference_update(blocks)

    def _check_exclusive(self, blocks: Iterable[int], how: str) -> None:
        allocator = self._blocks.allocator
        for block in blocks:
            if not allocator.is_writable(block):
                count, published = allocator.ref_count(block), allocator.is_cached(block)
                raise AssertionError(f"block {block} is {how}; it is held {count} times, published: {published}")


def _check_held(allocator: BlockAllocator, blocks: Iterable[int], how: str) -> None:
    for block in blocks:
        if allocator.ref_count(block) == 0 or allocator.is_cached(block):
            raise AssertionError(f"block {block} is {how}; nobody holds it, or it is published")
