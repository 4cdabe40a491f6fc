"""The last step of paged attention where sequences were computed in parts: their merge, in the order of the parts."""

from __future__ import annotations

from typing import Any

from numpy import float32

from .attention_tile import NOTHING, PART, finite_base, merged, parts_of
from .intrinsics import exp2
from .target import cuda, kernel, pure_function

Array = Any

AHEAD = 8  #: parts that are read before the first of them is merged


@pure_function
def sequence_of(token: Any, query_start: Array) -> Any:
    """The sequence that owns a token: the last one that starts at or before it (bisection)."""
    low, high = 0, query_start.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if query_start[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@kernel
def merge_kernel(
    out: Array,
    scratch: Array,
    context_lens: Array,
    query_start: Array,
    window: Any,
    num_sinks: Any,
    num_parts: Any,
    first_token: Any,
) -> None:
    # A thread a dim, a block a head of a token, from the first one on of which there are parts.
    sums, largests = cuda.local.array(AHEAD, float32), cuda.local.array(AHEAD, float32)
    weight_sums = cuda.local.array(AHEAD, float32)
    head, dim = cuda.blockIdx.y, cuda.threadIdx.x
    token, num_tokens = cuda.blockIdx.x + first_token, cuda.gridDim.x
    _, num_heads, head_dim = out.shape
    if token >= query_start[query_start.shape[0] - 1]:
        return  # padding: no sequence owns it
    sequence = sequence_of(token, query_start)
    stop = context_lens[sequence] - (query_start[sequence + 1] - 1 - token)
    start = max(stop - window, num_sinks) if window > 0 else num_sinks
    sink_parts, padded = parts_of(num_sinks), (head_dim + 3) // 4 * 4
    first_index = (cuda.blockIdx.x * num_heads + head) * num_parts
    statistics = num_tokens * num_heads * num_parts * padded + 2 * first_index
    total, total_sum, total_largest = float32(0), float32(0), NOTHING
    # The parts of sinks that this query sees, and those of other tokens.
    for span in range(2):
        first, last = 0, parts_of(min(num_sinks, stop))
        if span == 1:
            first, last = sink_parts + start // PART, sink_parts + (parts_of(stop) if start < stop else 0)
        for base in range(first, last, AHEAD):
            for i in range(AHEAD):
                part = min(base + i, last - 1)
                sums[i] = scratch[(first_index + part) * padded + min(dim, head_dim - 1)]
                largests[i], weight_sums[i] = scratch[statistics + 2 * part], scratch[statistics + 2 * part + 1]
            for i in range(AHEAD):
                if base + i < last and weight_sums[i] != float32(0):
                    largest = max(total_largest, largests[i])
                    finite = finite_base(largest)
                    old, new = exp2(total_largest - finite), exp2(largests[i] - finite)
                    total_largest = largest
                    total_sum = merged(total_sum, old, weight_sums[i], new)
                    total = merged(total, old, sums[i], new)
    if dim < head_dim:
        out[token, head, dim] = total / total_sum
