"""Attention over pages, one query at a time, in float64."""

from __future__ import annotations

import numpy as np

from ..ops import Array
from .pages import read_tokens


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
    num_sinks: int = 0,
    sink_q: Array | None = None,
) -> None:
    """Causal attention of every query over its sequence's pages; see :class:`minipage.kernels.ops.Ops`."""
    for sequence, context_len in enumerate(context_lens):
        first, end = query_start[sequence], query_start[sequence + 1]
        for token in range(first, end):
            # The queries are the last tokens of the context. This one sees the sinks and the tokens start..stop, itself
            # the last; a sink within the window is seen once, as a sink.
            stop = int(context_len - (end - 1 - token))
            sinks = min(num_sinks, stop)
            start = max(stop - window, sinks) if window else sinks
            seen = np.concatenate([np.arange(sinks), np.arange(start, stop)])
            keys, values = _gather(key_cache, value_cache, block_tables[sequence], seen)
            with np.errstate(invalid="ignore"):  # a NaN or an infinity in the context belongs in the result
                scores = _score(q[token], keys[:, sinks:], scale, soft_cap)
                if sink_q is not None:
                    sink_scores = _score(sink_q[token], keys[:, :sinks], scale, soft_cap)
                    scores = np.concatenate([sink_scores, scores], axis=-1)
                out[token] = _weigh(scores, values).reshape(q[token].shape)


def _gather(key_cache: Array, value_cache: Array, table: Array, positions: Array) -> tuple[Array, Array]:
    """The keys and values [KVH, n, D] of the tokens at these positions [n] of a sequence."""
    block_size = value_cache.shape[2]
    blocks, offsets = table[positions // block_size], positions % block_size
    keys, values = read_tokens(key_cache, value_cache, blocks, offsets)
    return keys.transpose(1, 0, 2), values.transpose(1, 0, 2)


def _score(q: Array, keys: Array, scale: float, soft_cap: float) -> Array:
    """The scores [KVH, NH / KVH, n] of n keys for all heads of one query; q [NH, D]."""
    num_kv_heads, _, head_dim = keys.shape
    grouped = q.reshape(num_kv_heads, -1, head_dim).astype(np.float64)
    scores = grouped @ keys.transpose(0, 2, 1) * scale
    return soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores


def _weigh(scores: Array, values: Array) -> Array:
    """softmax(scores) . values: [KVH, NH / KVH, D]."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ values / weights.sum(axis=-1, keepdims=True)
