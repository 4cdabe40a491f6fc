"""Linear layers of more tokens than :mod:`.linear_few` takes, with the same bits: 16 or 32 at once on tensor cores.

A warp has a tile of 16 outputs and one part of the inputs; the warps of a block have tiles side by side and share the tokens in
shared memory. Another kernel merges the parts.
"""

from __future__ import annotations

from typing import Any

from numpy import float32, int32, uint32

from .intrinsics import element_at, load16
from .linear_operands import KINDS, Kind
from .linear_parts import ITEM_WORDS, ZERO, Room, Source, reading, staging
from .rows import ACCESSES, choose
from .target import (
    HALF_OF_WARPS,
    SIMULATED,
    THREADS,
    WARP,
    blocks_for,
    bounded_kernel,
    cuda,
    kernel,
    launch,
    pure_function,
    scratch,
)
from .warps import LOG_WARP
from .weights import STEP, TILE

Array = Any

WARPS = 2 if SIMULATED else 8  #: of a block
SLAB = 64 if SIMULATED else 256  #: tokens of a launch, so that their parts do not take much memory
LOG_EIGHTS = 3  #: items of a token in a step


def _many_kernel(kind: Kind, log_tokens: int, load: Any) -> Any:
    stage, read = staging(kind, load), reading(kind)
    find, operands, add, shifted = kind.places, kind.operands, kind.add, kind.shifted
    tokens, log_items = 1 << log_tokens, log_tokens + LOG_EIGHTS
    num_words, num_totals, tiles_of_tokens = (1 << log_items) * ITEM_WORDS, 2 * tokens, tokens // 8

    @pure_function
    def multiply(
        sums: Array, a: Any, group_factors: Any, fragments: Array, totals: Array, lane: Any, first: Any
    ) -> None:
        """Add the products over a group, whose tokens are the ones from ``first`` on in shared memory."""
        for j in range(tiles_of_tokens):
            place = first * 32 + j * 128 + lane * 4
            b = load16(fragments, place), load16(fragments, place + tokens * 16)
            group_totals = ZERO, ZERO
            if shifted:
                pair = first + j * 8 + 2 * (lane & 3)
                group_totals = element_at(totals, pair), element_at(totals, pair + 1)
            added = add((sums[j, 0], sums[j, 1], sums[j, 2], sums[j, 3]), a, b, group_factors, group_totals)
            sums[j, 0], sums[j, 1], sums[j, 2], sums[j, 3] = added

    @bounded_kernel(WARPS * WARP, HALF_OF_WARPS // WARPS)
    def linear_many_kernel(parts: Array, x: Array, codes: Array, scales: Array, minima: Array, outputs: Any) -> None:
        # parts [gridDim.z, T, N]
        fragments = cuda.shared.array(num_words, uint32, alignment=16)
        totals = cuda.shared.array(num_totals, float32)
        sums = cuda.local.array((tiles_of_tokens, 4), float32)
        thread, part, splits = cuda.threadIdx.x, cuda.blockIdx.z, cuda.gridDim.z
        lane, token = thread & (WARP - 1), cuda.blockIdx.x * tokens
        wanted = int32(cuda.blockIdx.y * WARPS + (thread >> LOG_WARP))
        tile = min(wanted, (outputs + TILE - 1) // TILE - 1)  # a warp without a tile helps to bring tokens
        room = Room(0, 0, tokens, LOG_EIGHTS, log_items)
        factor_place = int32(tile * scales.shape[1] + (lane >> 2))
        source = Source(codes, scales, minima, find(codes, outputs, tile, lane), factor_place)
        steps = (x.shape[1] + STEP - 1) // STEP
        for j in range(tiles_of_tokens):
            for i in range(4):
                sums[j, i] = ZERO
        for step in range(int32(part * steps // splits), int32((part + 1) * steps // splits)):
            words, factors = read(source, step)
            cuda.syncthreads()
            stage(fragments, totals, room, x, token, step * STEP, thread, WARPS * WARP)
            cuda.syncthreads()
            multiply(sums, operands(words, 0), factors[0], fragments, totals, lane, 0)
            multiply(sums, operands(words, 1), factors[1], fragments, totals, lane, tokens)
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


def _kernels(kind: Kind) -> dict[str, dict[int, Any]]:
    made = {name: {4: _many_kernel(kind, 4, access.load)} for name, access in ACCESSES.items()}
    if kind.most_tokens == 32:  # by the other access they would need more registers than there are
        made["wide"][5] = _many_kernel(kind, 5, ACCESSES["wide"].load)
    return made


#: By kind of the weight, by access to x, by log2 of the tokens at once.
many_kernels = {name: _kernels(kind) for name, kind in KINDS.items()}


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
    by_tokens = choose(many_kernels[kind], x)
    log_tokens = min(max((tokens - 1).bit_length(), 4), max(by_tokens))
    # A part that is the only one is written where the result goes.
    parts = scratch("linear", splits * tokens * outputs) if splits > 1 else out.reshape(-1)
    # Blocks for the same weights run side by side: all but one find them in a cache.
    grid = blocks_for(tokens, 1 << log_tokens), blocks_for(outputs, TILE * WARPS), splits
    launch(by_tokens[log_tokens], grid, WARPS * WARP, parts, x, *arrays, outputs)
    unit = float32(KINDS[kind].unit)
    if splits > 1 or unit != 1 or bias is not None:
        any_bias, has_bias = x.reshape(-1) if bias is None else bias, int(bias is not None)
        grid = tokens, blocks_for(outputs, THREADS), 1
        launch(merge_parts_kernel, grid, THREADS, out, parts, splits, unit, any_bias, has_bias)
