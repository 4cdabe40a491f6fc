"""Whole decode steps for gpu_check.py, from token ids to logits, of models of random weights in the device's memory.

A step's floor is the time that it takes to read all weights, and K and V of all sequences, at the bandwidth of a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_check_models import SHAPES, random_parameters

from minipage.device.base import Device
from minipage.device.kv_cache import KVCache, KVShape
from minipage.kernels.ops import PackedWeight
from minipage.models import ModelConfig
from minipage.models.batch import Batch
from minipage.models.decoder import Decoder
from minipage.models.registry import read_config

BLOCK = 16


@functools.lru_cache(maxsize=1)  # of the models, one at a time
def loaded(device: Device, shape: str, kind: str) -> tuple[ModelConfig, dict[str, Any]]:
    """A model in the device's memory."""
    config = read_config(SHAPES[shape])
    return config, random_parameters(device, config, kind)


def decode_step(
    device: Device, shape: str, kind: str, batch: int, context: int
) -> tuple[Callable[[], None], int] | None:
    """A step of ``batch`` sequences that have ``context`` tokens each, and the bytes that it reads; None: no room for it."""
    config, params = loaded(device, shape, kind)
    pages = "float16" if kind.startswith("int") else kind
    kv_shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, pages)
    blocks = -(-context // BLOCK)
    if batch * blocks * kv_shape.bytes_per_block * 1.1 > device.free_memory():
        return None
    kv = KVCache(device, kv_shape, batch * blocks)
    kv.key[...] = kv.value[...] = 0
    limits = {"max_tokens": batch, "max_logit_rows": batch, "num_positions": context}
    decoder = Decoder(config, params, device, **limits)
    tables = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks)
    last = context - 1
    slots = tables[:, last // BLOCK] * BLOCK + last % BLOCK

    def ids(values: Any) -> Any:
        return device.array(np.asarray(values, dtype=np.int32))

    arrays = Batch(
        token_ids=ids(np.arange(batch) % config.vocab_size),
        positions=ids(np.full(batch, last)),
        query_start=ids(np.arange(batch + 1)),
        context_lens=ids(np.full(batch, context)),
        slots=(device.array(slots.astype(np.int64)),),
        block_tables=(ids(tables),),
    )
    rows = ids(np.arange(batch))

    def step() -> None:
        decoder.forward(arrays, kv)
        decoder.compute_logits(rows)

    weights = [weight for weight in params.values() if isinstance(weight, PackedWeight)]
    looked_up = params["embed"].nbytes if "lm_head" in params else 0  # of an embedding only some rows are read
    num_bytes = sum(weight.nbytes for weight in weights) - looked_up + batch * context * kv_shape.bytes_per_token
    return step, num_bytes
