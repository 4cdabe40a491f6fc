"""The KV cache of an engine: its groups of layers, its size, its pages and the accounting of their blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from ..cache import BlockManager, Group
from ..config import EngineConfig
from ..device import Device
from ..device.kv_cache import KVCache, KVShape, plan_num_blocks, plan_num_host_blocks
from ..models.config import ModelConfig
from . import debug

logger = logging.getLogger("minipage")


def make_cache(
    model_config: ModelConfig,
    config: EngineConfig,
    device: Device,
    weight_bytes: int,
    max_model_len: int,
    free_memory: int,
    default_budget: int,
) -> tuple[KVCache, BlockManager]:
    """The pages of all groups of layers, and the accounting of their blocks; the log tells their size.

    Memory is that which all ranks have, ``free_memory`` and, where nobody says how much to take, ``default_budget``.
    """
    groups, layer_groups = group_layers(model_config.windows, model_config.attention_sinks)
    shape = kv_shape(model_config, config.block_size, kv_dtype(model_config, config), layer_groups.count(0))
    num_blocks, message = plan_num_blocks(
        shape,
        free_memory=free_memory,
        weight_bytes=weight_bytes,
        budget=config.kv_cache_memory if isinstance(config.kv_cache_memory, int) else None,
        default_budget=default_budget,
        num_blocks=config.num_blocks,
        most_blocks=config.max_num_seqs * len(groups) * -(-max_model_len // config.block_size),
    )
    logger.info("KV cache: %s", message)
    taken = 0 if device.has_own_memory else num_blocks * shape.bytes_per_block
    num_host_blocks = plan_num_host_blocks(shape, int(config.swap_space), device.free_host_memory() - taken)
    blocks = BlockManager(
        num_blocks, config.block_size, groups, caching=config.enable_prefix_caching, num_host_blocks=num_host_blocks
    )
    # Blocks are accounted for by rank 0 alone.
    is_checked = debug.is_enabled() and device.communicator.rank == 0
    new_cache = partial(debug.CheckedKVCache, blocks) if is_checked else KVCache
    kv = new_cache(device, shape, num_blocks, layer_groups=layer_groups, num_host_blocks=num_host_blocks)
    return kv, blocks


def group_layers(windows: Sequence[int], sinks: int = 0) -> tuple[list[Group], list[int]]:
    """Groups of layers that see alike, all of the size of the smallest kind, and the group of each layer.

    The last group of a kind may have fewer layers; its blocks are as large as the others' all the same.
    """
    size = min(windows.count(window) for window in windows)
    groups: list[Group] = []
    layer_groups: list[int] = []
    for index, window in enumerate(windows):
        if windows[:index].count(window) % size == 0:
            newest = len(groups)
            groups.append(Group(window, sinks))
        else:
            newest = max(group for group, previous in zip(layer_groups, windows, strict=False) if previous == window)
        layer_groups.append(newest)
    return groups, layer_groups


def kv_shape(model_config: ModelConfig, block_size: int, dtype: str, num_layers: int | None = None) -> KVShape:
    """What a block takes for a group of ``num_layers`` of this model's layers (None: for all of them)."""
    return KVShape(
        num_layers or model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, block_size, dtype
    )


def kv_dtype(model_config: ModelConfig, config: EngineConfig) -> str:
    """The dtype of K and V: the one asked for, else that asked for the weights, else the model's."""
    asked = (config.kv_cache_dtype, config.dtype, model_config.dtype)
    return next(dtype for dtype in asked if dtype != "auto")
