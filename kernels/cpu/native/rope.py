"""Rotary positions, and the write of K and V into their pages."""

from __future__ import annotations

from ...ops import Array
from .pages import write
from .share import Share, inner, part


def rope(out: Array, x: Array, cos: Array, sin: Array, positions: Array, last: int, share: Share) -> None:
    """out = x rotated to the position min(positions, last)."""
    begin, end = part(len(x), share)
    for t in range(begin, end):
        position = min(positions[t], last)
        for head in range(x.shape[1]):
            for i in range(x.shape[2]):
                out[t, head, i] = x[t, head, i]
            _rotate(out[t, head], cos[position], sin[position])


def rope_and_cache(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Array,
    share: Share,
) -> None:
    """Rotate q and k in place, then write k and v to their slots. The threads share the kv heads of all tokens."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    first, last = part(len(q) * kv_heads, share)
    for task in range(first, last):
        t, head = task // kv_heads, task % kv_heads
        angles = cos[positions[t]], sin[positions[t]]
        for query_head in range(head * group, (head + 1) * group):
            _rotate(q[t, query_head], angles[0], angles[1])
        _rotate(k[t, head], angles[0], angles[1])
        if slots[t] >= 0:  # a negative slot is padding
            block_size = value_cache.shape[2]
            block, offset = slots[t] // block_size, slots[t] % block_size
            write(k[t, head], v[t, head], key_cache[block, head], value_cache[block, head], offset)


@inner
def _rotate(x: Array, cos: Array, sin: Array) -> None:
    """Turn each pair (dim i, dim i + R/2) of a head x [D] by its angle; cos and sin [R/2]."""
    half = len(cos)
    for i in range(half):
        first, second = x[i], x[i + half]
        x[i] = first * cos[i] - second * sin[i]
        x[i + half] = second * cos[i] + first * sin[i]
