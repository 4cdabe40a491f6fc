"""Linear layers of up to eight tokens on tensor cores: a weight is read once, at the speed of memory, in one launch.

A thread block has a tile of 16 outputs, and each of its warps a part of the inputs, tokens included: it brings 2 KB of them at a
time to its own shared memory, many inputs of one token or fewer of eight. At the end the parts are merged in their order.
"""

from __future__ import annotations

from typing import Any

from numpy import float32, int32, uint32

from .intrinsics import element_at, load16
from .linear_operands import KINDS, Kind
from .linear_parts import FOUR_ZEROS, ITEM_WORDS, SPLITS, ZERO, Room, Source, reading_ahead, staging
from .rows import choose, for_each_access
from .target import HALF_OF_WARPS, WARP, blocks_for, bounded_kernel, cuda, launch
from .warps import LOG_WARP
from .weights import STEP, TILE

Array = Any

FEW = 8  #: the most tokens
LOG_ITEMS = 6  #: a warp's at a time: two a lane
ITEMS = 1 << LOG_ITEMS


def _few_kernel(kind: Kind, splits: int, load: Any) -> Any:
    stage, (begin, go_on) = staging(kind, load), reading_ahead(kind)
    find, operands, add, unit, shifted = kind.places, kind.operands, kind.add, float32(kind.unit), kind.shifted
    num_words, num_totals, num_sums = splits * ITEMS * ITEM_WORDS, splits * ITEMS // 4, splits * TILE * FEW

    @bounded_kernel(splits * WARP, HALF_OF_WARPS // splits)
    def linear_few_kernel(
        out: Array, x: Array, codes: Array, scales: Array, minima: Array, bias: Array, has_bias: Any, log_tokens: Any
    ) -> None:
        # 2 ** log_tokens is the number of tokens, rounded up.
        fragments = cuda.shared.array(num_words, uint32, alignment=16)
        totals = cuda.shared.array(num_totals, float32)
        merged = cuda.shared.array(num_sums, float32)
        thread, tile, outputs, tokens = cuda.threadIdx.x, cuda.blockIdx.x, out.shape[1], int32(1 << log_tokens)
        lane, part = thread & (WARP - 1), thread >> LOG_WARP
        # Of the lane's two tokens, the first; the last token stands in for those that are not there.
        pair = 2 * (lane & 3)
        room = Room(part * ITEMS * ITEM_WORDS, part * ITEMS // 4, tokens, LOG_ITEMS - log_tokens, LOG_ITEMS)
        own = room.start + 4 * min(lane, 4 * tokens - 1)
        own_total, next_total = room.start_total + min(pair, tokens - 1), room.start_total + min(pair + 1, tokens - 1)
        steps, at_once = (x.shape[1] + STEP - 1) // STEP, int32(FEW >> log_tokens)
        step, stop = int32(part * steps // splits), int32((part + 1) * steps // splits)
        factor_place, last = int32(tile * scales.shape[1] + (lane >> 2)), int32(stop - 1)
        source = Source(codes, scales, minima, find(codes, outputs, tile, lane), factor_place)
        ahead = begin(source, step, last)
        sums = FOUR_ZEROS
        while step < stop:
            cuda.syncwarp()
            stage(fragments, totals, room, x, 0, step * STEP, lane, WARP)
            cuda.syncwarp()
            for i in range(int32(min(at_once, int32(stop - step)))):
                (words, factors), ahead = ahead[0], go_on(ahead, source, int32(step + i), last)
                for half in range(2):
                    place, total = own + (2 * i + half) * tokens * 32, (2 * i + half) * tokens
                    b = load16(fragments, place), load16(fragments, place + tokens * 16)
                    group_totals = ZERO, ZERO
                    if shifted:
                        group_totals = element_at(totals, own_total + total), element_at(totals, next_total + total)
                    sums = add(sums, operands(words, half), b, factors[half], group_totals)
            step = int32(step + at_once)
        place = part * TILE * FEW + pair * TILE + (lane >> 2)
        merged[place], merged[place + TILE], merged[place + TILE // 2], merged[place + TILE + TILE // 2] = sums
        cuda.syncthreads()
        for i in range(thread, TILE * x.shape[0], splits * WARP):
            token, output = i // TILE, tile * TILE + i % TILE
            if output < outputs:
                total = merged[i]
                for other in range(1, splits):
                    total += merged[other * TILE * FEW + i]
                total *= unit
                out[token, output] = total + bias[output] if has_bias else total

    return linear_few_kernel


def _kernels(kind: Kind, splits: int) -> Any:
    return for_each_access(lambda load, store: _few_kernel(kind, splits, load))


#: By kind of the weight, by number of parts, by access to x.
few_kernels = {name: {splits: _kernels(kind, splits) for splits in SPLITS} for name, kind in KINDS.items()}


def linear_few(
    out: Array, x: Array, arrays: tuple[Array, Array, Array], kind: str, splits: int, bias: Array | None
) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias for T <= FEW, the weight given by :func:`.weights.arrays_of`."""
    tokens, outputs = out.shape
    function = choose(few_kernels[kind][splits], x)
    grid, threads = (blocks_for(outputs, TILE),), splits * WARP
    any_bias = x.reshape(-1) if bias is None else bias
    launch(function, grid, threads, out, x, *arrays, any_bias, int(bias is not None), (tokens - 1).bit_length())
