"""Searches in a row of logits, by one thread block: where in an order of its tokens does a cumulative mass reach a target?

Top-k is such a search (by logit, a mass of 1 each), and so are top-p (by weight) and the draw itself (by id). Masses are
integers, so that their sums do not depend on the order in which threads add them: weights, up to 1, count in units of 2**-40.

A maker takes a function ``entry(x, id, limits)`` that says what a logit ``x`` stands for. A search takes ``limits`` for it,
and a target above 0; or 0, and a fraction of the total mass from which it computes one. All threads of the block call a search,
with the same arguments, and get its result. Each reads one logit at a time: what they compute with it takes longer.
"""

from __future__ import annotations

import math
from typing import Any

from numpy import float32, int64, uint32

from .intrinsics import float_bits
from .random import part_of
from .target import SIMULATED, WARP, cuda, device_function, pure_function
from .warps import ALL_LANES, warp_sum

Array = Any

NUM_WARPS = 2 if SIMULATED else 32
THREADS = NUM_WARPS * WARP
#: Bits of a rank that a pass over the row finds; a simulated bin costs as much as a token.
DIGIT = 7 if SIMULATED else 11
BINS = 1 << DIGIT
PARTS = 32  #: into which a pass divides the ids that are still in question
CARRY = 1 << 32
SIGN = 1 << 31
#: Places (:func:`place_of`) of NaN, and of the outermost finite numbers.
PLACE_OF_NAN, LOWEST, HIGHEST = (1 << 32) - 1, 0x00800000, 0xFF7FFFFF


@pure_function
def place_of(x: Any) -> Any:
    """Where a float32 other than NaN is among all, 0 to 2**32 - 1, the larger the higher, -0 with 0: an int64."""
    bits = int64(float_bits(x))
    if x == float32(0):
        bits = int64(0)
    return PLACE_OF_NAN - bits if bits & SIGN else bits + SIGN


@device_function
def add_wide(low: Array, high: Array, place: Any, mass: Any) -> None:
    """Add 63 bits to a sum that is kept as two words: GPUs add words in shared memory, and nothing wider."""
    word, rest = mass & (CARRY - 1), mass >> 32
    if int64(cuda.atomic.add(low, place, uint32(word))) + word >= CARRY:
        rest += 1
    if rest > 0:
        cuda.atomic.add(high, place, uint32(rest))


@pure_function
def join_wide(low: Any, high: Any) -> Any:
    """Such a sum."""
    return int64(low) + (int64(high) << 32)


@device_function
def largest_of_block(value: Any) -> Any:
    """The largest of an int64 of each thread, in every thread."""
    partial = cuda.shared.array(NUM_WARPS, int64)
    distance = WARP // 2
    while distance > 0:
        value = max(value, cuda.shfl_xor_sync(ALL_LANES, value, distance))
        distance //= 2
    if cuda.threadIdx.x % WARP == 0:
        partial[cuda.threadIdx.x // WARP] = value
    cuda.syncthreads()
    for warp in range(NUM_WARPS):
        value = max(value, partial[warp])
    return value


@device_function
def sums_of_block(value: Any, partial: Array) -> Any:
    """Of an int64 of each thread: the sum over the threads before this one, and over all. ``partial`` is shared memory.

    It comes from the caller: Numba cannot link a function with memory of its own into two others.
    """
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    inclusive = value
    distance = 1
    while distance < WARP:
        other = cuda.shfl_up_sync(ALL_LANES, inclusive, distance)
        if lane >= distance:
            inclusive += other
        distance *= 2
    if lane == WARP - 1:
        partial[warp] = inclusive
    cuda.syncthreads()
    before, total = inclusive - value, int64(0)
    for other_warp in range(NUM_WARPS):
        if other_warp < warp:
            before += partial[other_warp]
        total += partial[other_warp]
    return before, total


@device_function
def find_largest(logits: Array, row: Any, maxima: Array) -> Any:
    """The id of the largest logit of a row, of equal ones the lowest; -1 where that is infinite, or a logit is NaN.

    ``maxima`` [rows, THREADS] gets the largest of what each thread has read.
    """
    size, largest, best, has_nan = logits.shape[1], float32(-math.inf), 0, False
    for i in range(cuda.threadIdx.x, size, THREADS):
        x = logits[row, i]
        if x > largest:
            largest, best = x, i
        has_nan = has_nan or x != x
    maxima[row, cuda.threadIdx.x] = largest
    place = int64(PLACE_OF_NAN) if has_nan else place_of(largest)
    found = largest_of_block(((place - SIGN) << 32) + (SIGN - 1 - best))
    return SIGN - 1 - (found & (2 * SIGN - 1)) if LOWEST <= (found >> 32) + SIGN <= HIGHEST else int64(-1)


def make_find_rank(entry: Any) -> Any:
    """find_rank(logits, row, limits, bits, target, fraction): entry gives a token's rank, below 2**bits, and its mass.

    The search goes from rank 0 up, some bits of the rank in a pass, by a histogram of the masses of what agrees in the bits
    found before. It returns the rank at which the target is reached, what was left of the target there, and the mass of
    all tokens of that rank.
    """

    @device_function
    def find_rank(logits: Array, row: Any, limits: Any, bits: Any, target: Any, fraction: Any) -> Any:
        low, high = cuda.shared.array(BINS, uint32), cuda.shared.array(BINS, uint32)
        found, partial = cuda.shared.array(3, int64), cuda.shared.array(NUM_WARPS, int64)
        thread, per_thread = cuda.threadIdx.x, BINS // THREADS
        prefix, known, shift = int64(0), bits, bits - DIGIT
        while True:
            for place in range(thread, BINS, THREADS):
                low[place] = uint32(0)
                high[place] = uint32(0)
            cuda.syncthreads()
            for i in range(thread, logits.shape[1], THREADS):
                rank, mass = entry(logits[row, i], i, limits)
                if mass > 0 and rank >> known == prefix >> known:
                    add_wide(low, high, (rank >> shift) & (BINS - 1), mass)
            cuda.syncthreads()
            own = int64(0)
            for place in range(per_thread * thread, per_thread * (thread + 1)):
                own += join_wide(low[place], high[place])
            before, total = sums_of_block(own, partial)
            if target == 0:
                target = max(int64(1), part_of(total, fraction))
            if before < target <= before + own:
                place, mass = per_thread * thread - 1, int64(0)
                while before + mass < target:
                    before += mass
                    place += 1
                    mass = join_wide(low[place], high[place])
                found[0], found[1], found[2] = place, before, mass
            cuda.syncthreads()
            prefix |= found[0] << shift
            target -= found[1]
            if shift == 0:
                return prefix, target, found[2]
            known, shift = shift, max(shift - DIGIT, 0)

    return find_rank


def make_find_id(entry: Any) -> Any:
    """find_id(logits, row, limits, target, fraction): entry gives a token's mass.

    The search goes from id 0 up: each pass divides the ids in question, by the masses of 32 parts of them. It returns the
    id at which the target is reached. The target of a fraction is the first whole number above it.
    """

    @device_function
    def find_id(logits: Array, row: Any, limits: Any, target: Any, fraction: Any) -> Any:
        sums = cuda.shared.array(PARTS, int64)
        warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
        start, stop = 0, logits.shape[1]
        while True:
            length = (stop - start + PARTS - 1) // PARTS
            for part in range(warp, PARTS, NUM_WARPS):
                mass, first = int64(0), start + part * length
                for i in range(first + lane, min(first + length, stop), WARP):
                    mass += entry(logits[row, i], i, limits)
                mass = warp_sum(mass)
                if lane == 0:
                    sums[part] = mass
            cuda.syncthreads()
            if target == 0:
                total = int64(0)
                for part in range(PARTS):
                    total += sums[part]
                target = part_of(total, fraction) + 1
            part = 0
            while sums[part] < target:
                target -= sums[part]
                part += 1
            cuda.syncthreads()  # the next pass writes there
            start += part * length
            stop = min(start + length, stop)
            if length == 1:
                return start

    return find_id
