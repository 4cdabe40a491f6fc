"""Linear layers with float32 weights: ROWS outputs of up to four tokens a thread block, each thread with four inputs in turn.

A thread's inputs, then the threads of a warp, then the warps are added up in an order that does not depend on the tokens.
"""

from __future__ import annotations

from typing import Any

from numpy import float32, int32

from .intrinsics import bits_float, multiply_add, stream16
from .linear_parts import ZERO
from .rows import ACCESSES, choose
from .target import HALF_OF_WARPS, SIMULATED, WARP, blocks_for, bounded_kernel, cuda, launch

Array = Any

ROWS = 4
WARPS = 1 if SIMULATED else 4
#: By access to x, log2 of the most tokens at once, as registers allow.
MOST_LOG_TOKENS = {"wide": 2, "plain": 1}


def _float32_kernel(log_tokens: int, load: Any) -> Any:
    tokens, columns, padded = 1 << log_tokens, ROWS << log_tokens, (ROWS << log_tokens) + 1

    @bounded_kernel(WARPS * WARP, HALF_OF_WARPS // WARPS)
    def linear_float32_kernel(out: Array, x: Array, weight: Array, bias: Array, has_bias: Any) -> None:
        of_threads = cuda.shared.array((WARPS, WARP, padded), float32)  # a column in 32 different banks
        of_warps = cuda.shared.array((WARPS, columns), float32)
        sums = cuda.local.array((ROWS, tokens), float32)
        rows = cuda.local.array((ROWS, 4), float32)
        thread = cuda.threadIdx.x
        first_output, first_token = int32(cuda.blockIdx.x * ROWS), int32(cuda.blockIdx.y * tokens)
        warp, lane = thread // WARP, thread % WARP
        (num_tokens, num_outputs), size = out.shape, weight.shape[1]
        start, last_token = first_output * size, int32(num_tokens - 1)
        last_row = int32(min(ROWS, num_outputs - first_output) - 1)
        for r in range(ROWS):
            for t in range(tokens):
                sums[r, t] = ZERO
        for i in range(int32(4 * thread), int32(x.shape[1]), int32(4 * WARPS * WARP)):
            for r in range(ROWS):  # rows and tokens that are not there repeat the last one, and are not written
                words = stream16(weight, start + int32(min(int32(r), last_row) * int32(size) + i))
                rows[r, 0], rows[r, 1] = bits_float(words[0]), bits_float(words[1])
                rows[r, 2], rows[r, 3] = bits_float(words[2]), bits_float(words[3])
            for t in range(tokens):
                a, b, c, d = load(x, min(int32(first_token + t), last_token), i)
                for r in range(ROWS):
                    total = multiply_add(b, rows[r, 1], multiply_add(a, rows[r, 0], sums[r, t]))
                    sums[r, t] = multiply_add(d, rows[r, 3], multiply_add(c, rows[r, 2], total))
        for r in range(ROWS):
            for t in range(tokens):
                of_threads[warp, lane, r * tokens + t] = sums[r, t]
        cuda.syncwarp()
        if lane < columns:
            total = of_threads[warp, 0, lane]
            for other in range(1, WARP):
                total += of_threads[warp, other, lane]
            of_warps[warp, lane] = total
        cuda.syncthreads()
        if thread < columns:
            output, token = first_output + thread // tokens, first_token + thread % tokens
            if output < num_outputs and token < num_tokens:
                total = of_warps[0, thread]
                for other in range(1, WARPS):
                    total += of_warps[other, thread]
                out[token, output] = total + bias[output] if has_bias else total

    return linear_float32_kernel


#: By access to x, by log2 of the tokens at once.
float32_kernels = {
    name: {log_tokens: _float32_kernel(log_tokens, access.load) for log_tokens in range(MOST_LOG_TOKENS[name] + 1)}
    for name, access in ACCESSES.items()
}


def linear_float32(out: Array, x: Array, weight: Array, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias, ``weight`` [N, Kp] float32 padded with zeros."""
    tokens, outputs = out.shape
    by_tokens = choose(float32_kernels, x)
    log_tokens = min((tokens - 1).bit_length(), max(by_tokens))
    grid = blocks_for(outputs, ROWS), blocks_for(tokens, 1 << log_tokens)
    any_bias = x.reshape(-1) if bias is None else bias
    launch(by_tokens[log_tokens], grid, WARPS * WARP, out, x, weight, any_bias, int(bias is not None))
