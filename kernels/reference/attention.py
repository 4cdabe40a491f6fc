"""Attention over pages, one query at a time, in float64."""

from __future__ import annotations

import numpy as np

from ..dtypes import to_float32
from ..ops import Array


def paged_attention(
    out: Array,
    q: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Causal attention of every query over its sequence's pages; see :class:`minipage.kernels.ops.Ops`."""
    for sequence, context_len in enumerate(context_lens):
        first, end = query_start[sequence], query_start[sequence + 1]
        for token in range(first, end):
            # The queries are the last tokens of the context; this one sees the tokens start..stop, itself the last.
            stop = int(context_len - (end - 1 - token))
            start = max(stop - window, 0) if window else 0
            keys, values = _gather(key_cache, value_cache, block_tables[sequence], start, stop)
            out[token] = _attend(q[token], keys, values, scale, soft_cap)


def _gather(key_cache: Array, value_cache: Array, table: Array, start: int, stop: int) -> tuple[Array, Array]:
    """The keys and values [KVH, stop - start, D] of the tokens start..stop of a sequence."""
    positions = np.arange(start, stop)
    block_size = value_cache.shape[2]
    blocks, offsets = table[positions // block_size], positions % block_size
    keys, values = key_cache[blocks, :, :, offsets], value_cache[blocks, :, offsets, :]
    return to_float32(keys).transpose(1, 0, 2), to_float32(values).transpose(1, 0, 2)


def _attend(q: Array, keys: Array, values: Array, scale: float, soft_cap: float) -> Array:
    """softmax(q . keys) . values for all heads of one query; q and the result [NH, D]."""
    num_kv_heads, _, head_dim = keys.shape
    grouped = q.reshape(num_kv_heads, -1, head_dim).astype(np.float64)
    with np.errstate(invalid="ignore"):  # a NaN or an infinity in the context belongs in the result
        scores = grouped @ keys.transpose(0, 2, 1) * scale
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ values / weights.sum(axis=-1, keepdims=True)).reshape(q.shape)
