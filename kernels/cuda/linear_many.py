"""Linear layers of more tokens than :mod:`.linear_few` takes, with the same bits: 16, 32 or 64 at once on tensor cores.

A warp has a tile of 16 outputs and one part of the inputs; the warps of a block have tiles side by side and share the tokens in
shared memory. Another kernel merges the parts.
"""

from __future__ import annotations

from typing import Any

from numpy import float32, uint32

from .intrinsics import element_at, load16
from .linear_operands import KINDS, Kind
from .linear_parts import ITEM_WORDS, ZERO, Room, Source, reading, staging
from .rows import choose, for_each_access
from .target import SIMULATED, THREADS, WARP, blocks_for, cuda, kernel, launch, scratch
from .weights import STEP, TILE

Array = Any

LOG_WARP = 5
WARPS = 2 if SIMULATED else 8  #: of a block
SLAB = 64 if SIMULATED else 256  #: tokens of a launch, so that their parts do not take much memory
LOG_EIGHTS = 3  #: items of a token in a step


def _many_kernel(kind: Kind, log_tokens: int, load: Any) -> Any:
    stage, read = staging(kind, load), reading(kind)
    find, operands, add, shifted = kind.places, kind.operands, kind.add, kind.shifted
    tokens, log_items = 1 << log_tokens, log_tokens + LOG_EIGHTS
    num_words, num_totals, tiles_of_tokens = (1 << log_items) * ITEM_WORDS, 2 * tokens, tokens // 8

    @kernel
    def linear_many_kernel(parts: Array, x: Array, codes: Array, scales: Array, minima: Array, outputs: Any) -> None:
        # parts [gridDim.y, T, N]
        fragments = cuda.shared.array(num_words, uint32)
        totals = cuda.shared.array(num_totals, float32)
        sums = cuda.local.array((tiles_of_tokens, 4), float32)
        thread, part, splits = cuda.threadIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        lane, token = thread & (WARP - 1), cuda.blockIdx.z * tokens
        wanted = cuda.blockIdx.x * WARPS + (thread >> LOG_WARP)
        tile = min(wanted, (outputs + TILE - 1) // TILE - 1)  # a warp without a tile helps to bring tokens
        room = Room(0, 0, tokens, LOG_EIGHTS, log_items)
        factor_place = tile * scales.shape[1] + (lane >> 2)
        source = Source(codes, scales, minima, find(codes, outputs, tile, lane), factor_place)
        steps = (x.shape[1] + STEP - 1) // STEP
        for j in range(tiles_of_tokens):
            for i in range(4):
                sums[j, i] = ZERO
        for step in range(part * steps // splits, (part + 1) * steps // splits):
            words, factors = read(source, step)
            cuda.syncthreads()
            stage(fragments, totals, room, x, token, step * STEP, thread, WARPS * WARP)
            cuda.syncthreads()
            for half in range(2):
                a = operands(words, half)
                for j in range(tiles_of_tokens):
                    place = half * tokens * 32 + j * 128 + lane * 4
                    b = load16(fragments, place), load16(fragments, place + tokens * 16)
                    group_totals = ZERO, ZERO
                    if shifted:
                        pair = half * tokens + j * 8 + 2 * (lane & 3)
                        group_totals = element_at(totals, pair), element_at(totals, pair + 1)
                    added = add((sums[j, 0], sums[j, 1], sums[j, 2], sums[j, 3]), a, b, factors[half], group_totals)
                    sums[j, 0], sums[j, 1], sums[j, 2], sums[j, 3] = added
        for j in range(tiles_of_tokens):
            for i in range(4):
                row = token + j * 8 + 2 * (lane & 3) + (i & 1)
                output = wanted * TILE + (lane >> 2) + (i >> 1) * (TILE // 2)
                if row < x.shape[0] and output < outputs:
                    parts[(part * x.shape[0] + row) * outputs + output] = sums[j, i]

    return linear_many_kernel


@kernel
def merge_parts_kernel(out: Array, parts: Array, splits: Any, unit: Any, bias: Array, has_bias: Any) -> None:
    # ``out`` may be the only part
    row, output = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    tokens, outputs = out.shape
    if output < outputs:
        total = parts[row * outputs + output]
        for part in range(1, splits):
            total += parts[(part * tokens + row) * outputs + output]
        total *= unit
        out[row, output] = total + bias[output] if has_bias else total


def _kernels(kind: Kind, log_tokens: int) -> Any:
    return for_each_access(lambda load, store: _many_kernel(kind, log_tokens, load))


#: By kind of the weight, by log2 of the tokens at once, by access to x.
many_kernels = {
    name: {log_tokens: _kernels(kind, log_tokens) for log_tokens in range(4, kind.most_tokens.bit_length())}
    for name, kind in KINDS.items()
}


def linear_many(
    out: Array, x: Array, arrays: tuple[Array, Array, Array], kind: str, splits: int, bias: Array | None
) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias for any T, the weight given by :func:`.weights.arrays_of`."""
    for start in range(0, len(x), SLAB):
        rows = slice(start, start + SLAB)
        _linear_slab(out[rows], x[rows], arrays, kind, splits, bias)


def _linear_slab(
    out: Array, x: Array, arrays: tuple[Array, Array, Array], kind: str, splits: int, bias: Array | None
) -> None:
    tokens, outputs = out.shape
    log_tokens = min(max((tokens - 1).bit_length(), 4), max(many_kernels[kind]))
    function = choose(many_kernels[kind][log_tokens], x)
    # A part that is the only one is written where the result goes.
    parts = scratch("linear", splits * tokens * outputs) if splits > 1 else out.reshape(-1)
    grid = blocks_for(outputs, TILE * WARPS), splits, blocks_for(tokens, 1 << log_tokens)
    launch(function, grid, WARPS * WARP, parts, x, *arrays, outputs)
    unit = float32(KINDS[kind].unit)
    if splits > 1 or unit != 1 or bias is not None:
        any_bias, has_bias = x.reshape(-1) if bias is None else bias, int(bias is not None)
        grid = tokens, blocks_for(outputs, THREADS), 1
        launch(merge_parts_kernel, grid, THREADS, out, parts, splits, unit, any_bias, has_bias)
