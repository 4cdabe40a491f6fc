"""The pages: K and V of all layers in fixed-size blocks, their size, and the copies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OutOfMemoryError, mebibytes
from ..kernels.ops import Array
from ..kernels.pages import PAGE_STORAGE, page_dim
from .base import Device

#: Bytes of K, or V, of a layer: until more are used, the device may take the pages for hardly used ones.
_BYTES_AT_FIRST = 256 << 10


@dataclass(frozen=True)
class KVShape:
    """The shape of one model's KV: what a token takes, whatever the number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  #: "float32" | "bfloat16" | "float16" | "int8"

    @property
    def page_dim(self) -> int:
        """Elements of K, or of V, of a token and head in its page: ``head_dim``, and in int8 the bytes of a scale."""
        return page_dim(self.head_dim, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.page_dim * PAGE_STORAGE[self.dtype].itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of ``block_size`` tokens in all layers."""
        return self.bytes_per_token * self.block_size


class KVCache:
    """K and V pages: ``key`` and ``value`` [layers, num_blocks, ...] in the layout of the device's ops.

    A physical block is the same index in every layer of its group. Groups of layers share the pages: layer j of each group is
    at index j, and a block belongs to one group at a time. The storage is uninitialised: unused slots may hold anything.
    """

    def __init__(
        self,
        device: Device,
        shape: KVShape,
        num_blocks: int,
        *,
        layer_groups: Sequence[int] | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """``layer_groups`` names the group of each layer of the model (None: all are of one); ``shape.num_layers`` is what the
        largest group has. ``num_host_blocks`` more are kept in host memory, to swap to.
        """
        groups = list(layer_groups or [0] * shape.num_layers)
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_groups = max(groups) + 1
        self._device = device
        self._places = [(group, groups[:index].count(group)) for index, group in enumerate(groups)]
        self.key, self.value = self._pages(num_blocks, device.empty_pages)
        self._blocks_at_first = _BYTES_AT_FIRST // (self.key.nbytes // (len(self.key) * num_blocks))
        self._is_filling = False  # whether more than these have been written to
        self.host_key, self.host_value = self._pages(num_host_blocks, device.empty_host)

    def _pages(self, num_blocks: int, empty: Callable[[Sequence[int], Any], Array]) -> tuple[Array, Array]:
        shape, ops = self.shape, self._device.ops
        plain = (num_blocks, shape.num_kv_heads, shape.block_size, shape.page_dim)
        key, value = ([shape.num_layers, *(plain[a] for a in axes)] for axes in (ops.KEY_AXES, ops.VALUE_AXES))
        return empty(key, PAGE_STORAGE[shape.dtype]), empty(value, PAGE_STORAGE[shape.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes that the pages take on the device."""
        return int(self.key.nbytes + self.value.nbytes)

    def layer(self, index: int) -> tuple[Array, Array, int]:
        """The key and value pages of a layer of the model, views [num_blocks, ...], and its group."""
        group, place = self._places[index]
        return self.key[place], self.value[place], group

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers, in one launch; sources and destinations do not overlap."""
        src, dst = self._columns(copies)
        self._device.ops.copy_blocks(self.key, self.value, src, dst)

    def swap_out(self, swaps: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) to the host pool in all layers, in one launch."""
        self._swap(swaps, (self.key, self.value), (self.host_key, self.host_value))

    def swap_in(self, swaps: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) from the host pool in all layers, in one launch."""
        self._swap(swaps, (self.host_key, self.host_value), (self.key, self.value))

    def _swap(self, swaps: Sequence[tuple[int, int]], source: tuple[Array, Array], target: tuple[Array, Array]) -> None:
        if swaps:
            self._device.ops.swap_blocks(*source, *target, *self._columns(swaps))

    def expect_writes(self, slots: Sequence[np.ndarray]) -> None:
        """Tokens are about to be written to ``slots``, host arrays [T] of block * block_size + offset, one a group.

        The device learns when they are more than the first few; a storage that checks its writes does it here.
        """
        if not self._is_filling:
            num_blocks = max(int(each.max(initial=0)) for each in slots) // self.shape.block_size + 1
            self._is_filling = num_blocks > self._blocks_at_first
            if self._is_filling:
                for pages in (self.key, self.value):
                    self._device.fill_pages(pages, num_blocks)

    def read(self, layer: int, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """K and V of ``blocks`` in layer ``layer`` of their groups, on the host, in the plain layout [n, KVH, B, D].

        In int8 [n, KVH, B, D + 4]: the bytes of the scales are permuted with the others, and are those of one token in V only.
        """
        pages = self._device.array(np.array(blocks, dtype=np.int64))
        ops, host = self._device.ops, self._device.host
        key, value = host(self.key[layer][pages]), host(self.value[layer][pages])
        return key.transpose(np.argsort(ops.KEY_AXES)), value.transpose(np.argsort(ops.VALUE_AXES))

    def write(self, layer: int, blocks: Sequence[int], key: np.ndarray, value: np.ndarray) -> None:
        """Put K and V back as :meth:`read` gave them, here or on another device."""
        pages = self._device.array(np.array(blocks, dtype=np.int64))
        ops, array = self._device.ops, self._device.array
        self.key[layer][pages] = array(np.ascontiguousarray(key.transpose(ops.KEY_AXES)))
        self.value[layer][pages] = array(np.ascontiguousarray(value.transpose(ops.VALUE_AXES)))

    def _columns(self, pairs: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        columns = self._device.array(np.array(pairs, dtype=np.int64).T.copy())
        return columns[0], columns[1]


def plan_num_blocks(
    shape: KVShape,
    *,
    free_memory: int,
    weight_bytes: int,
    budget: int | None,
    default_budget: int,
    num_blocks: int | None,
    most_blocks: int,
) -> tuple[int, str]:
    """How many blocks to hold, and a sentence that says why.

    Args:
        shape: what a block takes.
        free_memory: bytes that the device has free, the weights loaded already.
        weight_bytes: bytes of the weights, for the sentence.
        budget: bytes to give to the cache; None takes ``default_budget``, and no more than ``most_blocks``.
        default_budget: bytes to give to the cache where neither ``budget`` nor ``num_blocks`` says how many.
        num_blocks: a fixed number of blocks, which overrides the budget.
        most_blocks: blocks that could ever be held at once (by max_num_seqs sequences of max_model_len).

    Raises:
        OutOfMemoryError: the pages do not fit what is free, or the budget is less than one block.
    """
    if num_blocks is None:
        num_blocks = (
            min(default_budget // shape.bytes_per_block, most_blocks)
            if budget is None
            else budget // shape.bytes_per_block
        )
    wanted = num_blocks * shape.bytes_per_block
    message = (
        f"weights {mebibytes(weight_bytes)}, free memory {mebibytes(free_memory)}, {shape.bytes_per_block:,} bytes per block of "
        f"{shape.block_size} tokens: {num_blocks} blocks, {mebibytes(wanted)}, hold {num_blocks * shape.block_size:,} tokens"
    )
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"the KV cache has no room for one block ({message}); "
            "give more kv_cache_memory, a smaller block_size or another device"
        )
    if wanted > free_memory:
        raise OutOfMemoryError(f"the KV cache does not fit ({message}); lower num_blocks or kv_cache_memory")
    return num_blocks, message


def plan_num_host_blocks(shape: KVShape, swap_space: int, free_memory: int) -> int:
    """How many blocks ``swap_space`` bytes of host memory hold; OutOfMemoryError where less is free."""
    # Below 0 where others took some meanwhile: who wants none is not refused for that.
    free_memory = max(free_memory, 0)
    if swap_space > free_memory:
        raise OutOfMemoryError(
            f"swap_space={mebibytes(swap_space)} does not fit; {mebibytes(free_memory)} of host memory are free besides "
            "what the model takes; lower swap_space, num_blocks or kv_cache_memory"
        )
    return swap_space // shape.bytes_per_block
