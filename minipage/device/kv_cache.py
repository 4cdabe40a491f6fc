"""The pages: K and V of all layers in fixed-size blocks, their size, and the copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import OutOfMemoryError
from ..kernels.dtypes import STORAGE
from ..kernels.ops import Array
from .base import Device


@dataclass(frozen=True)
class KVShape:
    """The shape of one model's KV: what a token takes, whatever the number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  #: "float32" | "bfloat16" | "float16"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * STORAGE[self.dtype].itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of ``block_size`` tokens in all layers."""
        return self.bytes_per_token * self.block_size


class KVCache:
    """K and V pages of all layers: ``key`` and ``value`` [L, num_blocks, ...] in the layout of the device's ops.

    A physical block is the same index in every layer. The storage is uninitialised: unused slots may hold anything.
    """

    def __init__(self, device: Device, shape: KVShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._device = device
        plain = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        dtype = STORAGE[shape.dtype]
        self.key = device.empty([shape.num_layers, *(plain[axis] for axis in device.ops.KEY_AXES)], dtype)
        self.value = device.empty([shape.num_layers, *(plain[axis] for axis in device.ops.VALUE_AXES)], dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that the pages take."""
        return int(self.key.nbytes + self.value.nbytes)

    def layer(self, index: int) -> tuple[Array, Array]:
        """The key and value pages of one layer, views [num_blocks, ...]."""
        return self.key[index], self.value[index]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all layers, in one launch; sources and destinations do not overlap."""
        pairs = self._device.array(np.array(copies, dtype=np.int64).reshape(-1, 2).T.copy())
        self._device.ops.copy_blocks(self.key, self.value, pairs[0], pairs[1])


def plan_num_blocks(
    shape: KVShape,
    *,
    free_memory: int,
    weight_bytes: int,
    budget: int | None,
    num_blocks: int | None,
    most_tokens: int,
) -> tuple[int, str]:
    """How many blocks to hold, and a sentence that says why.

    Args:
        shape: what a block takes.
        free_memory: bytes that the device has free, the weights loaded already.
        weight_bytes: bytes of the weights, for the sentence.
        budget: bytes to give to the cache; None takes half of what is free, and no more than can be used.
        num_blocks: a fixed number of blocks, which overrides the budget.
        most_tokens: tokens that could ever be held at once (max_num_seqs sequences of max_model_len).

    Raises:
        OutOfMemoryError: the pages do not fit what is free, or the budget is less than one block.
    """
    if num_blocks is None:
        usable = -(-most_tokens // shape.block_size)
        num_blocks = (
            min(free_memory // 2 // shape.bytes_per_block, usable)
            if budget is None
            else budget // shape.bytes_per_block
        )
    wanted = num_blocks * shape.bytes_per_block
    message = (
        f"weights {_mib(weight_bytes)}, free memory {_mib(free_memory)}, {shape.bytes_per_block:,} bytes per block of "
        f"{shape.block_size} tokens: {num_blocks} blocks, {_mib(wanted)}, hold {num_blocks * shape.block_size:,} tokens"
    )
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"the KV cache has no room for one block ({message}); "
            "give more kv_cache_memory, a smaller block_size or another device"
        )
    if wanted > free_memory:
        raise OutOfMemoryError(f"the KV cache does not fit ({message}); lower num_blocks or kv_cache_memory")
    return num_blocks, message


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
