"""Linear layers with float32 weights: ROWS outputs of up to eight tokens a thread block, each thread with four inputs in turn.

A thread's inputs, then the threads of a warp, then the warps are added up in an order that does not depend on the tokens.
"""

from __future__ import annotations

from typing import Any

from numpy import float32

from .intrinsics import bits_float, multiply_add, stream16
from .linear_parts import ZERO
from .rows import choose, for_each_access
from .target import SIMULATED, WARP, blocks_for, cuda, kernel, launch

Array = Any

ROWS = 4
WARPS = 1 if SIMULATED else 4
MOST_LOG_TOKENS = 3


def _float32_kernel(log_tokens: int, load: Any) -> Any:
    tokens, columns, padded = 1 << log_tokens, ROWS << log_tokens, (ROWS << log_tokens) + 1

    @kernel
    def linear_float32_kernel(out: Array, x: Array, weight: Array, bias: Array, has_bias: Any) -> None:
        of_threads = cuda.shared.array((WARPS, WARP, padded), float32)  # a column in 32 different banks
        of_warps = cuda.shared.array((WARPS, columns), float32)
        sums = cuda.local.array((ROWS, tokens), float32)
        rows = cuda.local.array((ROWS, 4), float32)
        thread, first_output, first_token = cuda.threadIdx.x, cuda.blockIdx.x * ROWS, cuda.blockIdx.y * tokens
        warp, lane = thread // WARP, thread % WARP
        (num_tokens, num_outputs), size = out.shape, weight.shape[1]
        for r in range(ROWS):
            for t in range(tokens):
                sums[r, t] = ZERO
        for i in range(4 * thread, x.shape[1], 4 * WARPS * WARP):
            for r in range(ROWS):  # rows and tokens that are not there repeat the last one, and are not written
                words = stream16(weight, min(first_output + r, num_outputs - 1) * size + i)
                rows[r, 0], rows[r, 1] = bits_float(words[0]), bits_float(words[1])
                rows[r, 2], rows[r, 3] = bits_float(words[2]), bits_float(words[3])
            for t in range(tokens):
                a, b, c, d = load(x, min(first_token + t, num_tokens - 1), i)
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


def _kernels(log_tokens: int) -> Any:
    return for_each_access(lambda load, store: _float32_kernel(log_tokens, load))


#: By log2 of the tokens at once, by access to x.
float32_kernels = {log_tokens: _kernels(log_tokens) for log_tokens in range(MOST_LOG_TOKENS + 1)}


def linear_float32(out: Array, x: Array, weight: Array, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias, ``weight`` [N, Kp] float32 padded with zeros."""
    tokens, outputs = out.shape
    log_tokens = min((tokens - 1).bit_length(), MOST_LOG_TOKENS)
    grid = blocks_for(outputs, ROWS), blocks_for(tokens, 1 << log_tokens)
    any_bias = x.reshape(-1) if bias is None else bias
    function = choose(float32_kernels[log_tokens], x)
    launch(function, grid, WARPS * WARP, out, x, weight, any_bias, int(bias is not None))
