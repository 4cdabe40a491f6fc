"""What the two kernels for linear layers on tensor cores share: how inputs are cut into parts, and what comes before a product.

Tokens are brought to shared memory as words of operand b (:mod:`.linear_operands`). What a thread brings at a time, eight inputs
of a token, is an item; of 32 inputs, each token has four items of two times four words. A lane's four words of a product lie
side by side, and so do those of all lanes.

Steps, rows and columns are counted in 32 bits. Those of Numba's integers are 64, which are two registers each, and a thread of
these kernels has few left: 64 in all, so that a multiprocessor holds half of the warps that it can.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy import float32, int32, uint32

from .intrinsics import element_at, store16
from .linear_operands import EIGHT, Kind, sum_of_parts
from .target import blocks_for, pure_function
from .warps import quad_sum
from .weights import STEP, TILE

Array = Any

SPLITS = (1, 4, 8, 16)  #: into how many parts inputs may be cut
ENOUGH = 2048  #: warps, each with a part of a tile, that keep all multiprocessors of a large GPU busy
ITEM_WORDS = 8
ZERO = float32(0)
FOUR_ZEROS = (ZERO, ZERO, ZERO, ZERO)


def num_splits(shape: tuple[int, int]) -> int:
    """Parts of the inputs of a weight of ``shape`` (N, K): the fewer outputs, the more; and none without a step."""
    tiles, steps = blocks_for(shape[0], TILE), blocks_for(shape[1], STEP)
    wanted = next((n for n in SPLITS if tiles * n >= ENOUGH), SPLITS[-1])
    return max(n for n in SPLITS if n <= min(wanted, max(1, steps)))


class Room(NamedTuple):
    """Where items go: the first word, the first total, for how many tokens, log2 of the items of each, and of all."""

    start: Any
    start_total: Any
    tokens: Any
    log_eights: Any
    log_items: Any


def staging(kind: Kind, load: Any) -> Any:
    """The function that brings tokens to shared memory; ``load`` as in :mod:`.rows`."""
    split, shifted = kind.split, kind.shifted

    @pure_function
    def stage(
        words: Array, totals: Array, room: Room, x: Array, token: Any, column: Any, thread: Any, threads: Any
    ) -> None:
        """The items of x[token:, column:], thread number ``thread`` of ``threads``; 0 for what lies beyond x. Where they are
        wanted, ``totals`` gets the sums over groups of 32 inputs."""
        num_tokens, size = int32(x.shape[0]), int32(x.shape[1])
        for item in range(thread, 1 << room.log_items, threads):
            row, eight = item >> room.log_eights, item & ((1 << room.log_eights) - 1)
            source_row, i = int32(token + row), int32(column + eight * EIGHT)
            p, q = FOUR_ZEROS, FOUR_ZEROS
            if source_row < num_tokens and i < size:
                p = load(x, source_row, i)
                if int32(i + 4) < size:
                    q = load(x, source_row, int32(i + 4))
            (a, e), (b, f), (c, g), (d, h) = split(p[0], p[1]), split(p[2], p[3]), split(q[0], q[1]), split(q[2], q[3])
            place = room.start + ((eight >> 2) * 2 * room.tokens + row) * 16 + (eight & 3) * 4
            store16(words, place, (a, b, e, f))
            store16(words, place + room.tokens * 16, (c, d, g, h))
            if shifted:
                total = quad_sum((sum_of_parts(a, e) + sum_of_parts(b, f)) + (sum_of_parts(c, g) + sum_of_parts(d, h)))
                if eight & 3 == 0:
                    totals[room.start_total + (eight >> 2) * room.tokens + row] = total

    return stage


class Source(NamedTuple):
    """Where a lane reads a weight: its arrays, the places of its codes, and that of its two rows' words of factors."""

    codes: Any
    scales: Any
    minima: Any
    places: Any
    factor_place: Any


def reading(kind: Kind) -> Any:
    """The function that reads what a step takes of a weight: the words of codes, and for both groups those of scale and minimum.
    What a kind lacks is not read."""
    words, scaled, has_minima = kind.words, kind.scaled, kind.has_minima

    @pure_function
    def factors(source: Source, group: Any) -> Any:
        place = int32(source.factor_place + group * 8)
        scale = element_at(source.scales, place) if scaled else uint32(0)
        return scale, element_at(source.minima, place) if has_minima else uint32(0)

    @pure_function
    def read(source: Source, step: Any) -> Any:
        codes = words(source.codes, source.places, step)
        return codes, (factors(source, 2 * step), factors(source, 2 * step + 1))

    return read


def reading_ahead(kind: Kind) -> tuple[Any, Any]:
    """Functions that begin, and go on, to have what ``kind.depth`` steps take on its way from memory.

    Steps behind ``last`` are not read: it is read again, from a cache.
    """
    read, depth = reading(kind), kind.depth

    @pure_function
    def begin(source: Source, step: Any, last: Any) -> Any:
        first = read(source, step)
        if depth == 1:
            return (first,)
        second = read(source, min(int32(step + 1), last))
        if depth == 2:
            return first, second
        return first, second, read(source, min(int32(step + 2), last))

    @pure_function
    def go_on(ahead: Any, source: Source, step: Any, last: Any) -> Any:
        return (*ahead[1:], read(source, min(int32(step + depth), last)))

    return begin, go_on
