"""A part of attention: the scores of some rows and tokens, their softmax, and the values that it weighs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...ops import Array
from .microkernel import multiply
from .pages import distance, scale_keys, scale_values
from .share import inner
from .softmax import exponentials


class Pages(NamedTuple):
    """The caches of a layer, [num_blocks, KVH, ...]; :mod:`.pages` knows the layout of a block."""

    keys: Array
    values: Array
    block_size: int


class Scoring(NamedTuple):
    """What is done to a score before the softmax, how far back a token sees, and how many of the first tokens it sees."""

    scale: float
    window: int
    soft_cap: float
    num_sinks: int


class Room(NamedTuple):
    """Memory of one thread for one task of up to R rows."""

    queries: Array  #: [R, D]
    scores: Array  #: [R, part size]
    sums: Array  #: [2, R, D]: of the parts so far, and of one part: weights times values
    softmax: Array  #: [2, R, 2]: of the same, each row's largest score and the sum of its weights
    seen: Array  #: [R, 2] int64: the first token that a row sees, and the one after the last


def reduce_of(many: int, few: int, token_lanes: int, dim_lanes: int) -> Callable[..., None]:
    """The function that reduces a part, for ``many`` or ``few`` rows at once (which divide those of a query), and block and
    head sizes that these lanes divide.
    """
    score, weigh = _score_of(many, few, token_lanes), _weigh_of(many, few, dim_lanes)

    @inner
    def reduce(
        pages: Pages,
        head: int,
        table: Array,
        scoring: Scoring,
        num_rows: int,
        head_dim: int,
        start: int,
        stop: int,
        room: Room,
    ) -> None:
        """Sums and softmax of the tokens start .. stop, which lie within one part, to the second half of ``room``."""
        block_size = pages.block_size
        scores, sums, softmax = room.scores, room.sums[1], room.softmax[1]
        first, last = max(start, room.seen[0, 0]) // block_size, (stop - 1) // block_size
        for block in range(first, last + 1):
            page, column = pages.keys[table[block], head], block * block_size - start
            ahead = distance(page, pages.keys[table[min(block + 1, last)], head])
            score(num_rows, room.queries, page[:head_dim], scores[:, column : column + block_size], ahead)
            scale_keys(page, scores[:num_rows, column : column + block_size], head_dim, block_size)
        for row in range(num_rows):
            low, high = max(room.seen[row, 0], start) - start, min(room.seen[row, 1], stop) - start
            softmax[row, 0], softmax[row, 1] = 0, 0
            if low < high:
                if scoring.soft_cap > 0:
                    _cap(scores[row, low:high], scoring.scale, scoring.soft_cap)
                scale = np.float32(1) if scoring.soft_cap > 0 else scoring.scale
                softmax[row, 0], softmax[row, 1] = exponentials(scores[row, low:high], scale)
            for d in range(head_dim):
                sums[row, d] = 0
        for block in range(first, last + 1):
            page, column = pages.values[table[block], head], block * block_size - start
            ahead = distance(page, pages.values[table[min(block + 1, last)], head])
            scale_values(page, scores[:num_rows, column : column + block_size], head_dim, block_size)
            weigh(num_rows, sums, scores[:, column:], page[:, :head_dim], room.seen, block * block_size, ahead)

    return reduce


@inner
def _cap(scores: Array, scale: Any, soft_cap: Any) -> None:
    for t in range(len(scores)):
        scores[t] = soft_cap * np.float32(np.tanh(scores[t] * scale / soft_cap))


def _score_of(many: int, few: int, lanes: int) -> Callable[..., None]:
    @inner
    def score(num_rows: int, queries: Array, keys: Array, scores: Array, ahead: int) -> None:
        """scores [rows, B] = queries [rows, D] @ keys [D, B]."""
        columns, row = keys.shape[1], 0
        while row + many <= num_rows:
            multiply(many, lanes, columns, False, queries[row:], keys, scores[row:], ahead)
            row += many
        while row < num_rows:
            multiply(few, lanes, columns, False, queries[row:], keys, scores[row:], ahead)
            row += few

    return score


def _weigh_of(many: int, few: int, lanes: int) -> Callable[..., None]:
    @inner
    def weigh(num_rows: int, sums: Array, weights: Array, values: Array, seen: Array, start: int, ahead: int) -> None:
        """Add weights @ values of the block that begins at token ``start`` to the sums of the rows.

        Each row takes the tokens that it sees: a slot that it does not see may hold NaN, which no weight of 0 would undo.
        """
        columns, row = values.shape[1], 0
        while row < num_rows:
            first, end = max(seen[row, 0] - start, 0), min(seen[row, 1] - start, len(values))
            alike = few  # rows of one query see the same
            while alike < many and row + alike < num_rows and _sees(seen, row + alike, start, len(values), first, end):
                alike += few
            if first < end and alike == many:
                multiply(many, lanes, columns, True, weights[row:, first:end], values[first:end], sums[row:], ahead)
            elif first < end:
                for i in range(row, row + alike, few):
                    multiply(few, lanes, columns, True, weights[i:, first:end], values[first:end], sums[i:], ahead)
            row += alike

    return weigh


@inner
def _sees(seen: Array, row: int, start: int, size: int, first: int, end: int) -> bool:
    """Whether a row sees the tokens first .. end of the block that begins at ``start``."""
    is_same: bool = max(seen[row, 0] - start, 0) == first and min(seen[row, 1] - start, size) == end
    return is_same


@inner
def merge_row(sums: Array, softmax: Array, part_sums: Array, part_largest: Any, part_total: Any) -> None:
    """Take a part's sums and softmax into those of the parts before it."""
    if part_total == 0:
        return
    if softmax[1] == 0:
        softmax[0], softmax[1] = part_largest, part_total
        for d in range(len(sums)):
            sums[d] = part_sums[d]
        return
    largest = max(softmax[0], part_largest)
    old, new = np.float32(np.exp(softmax[0] - largest)), np.float32(np.exp(part_largest - largest))
    softmax[0], softmax[1] = largest, softmax[1] * old + part_total * new
    for d in range(len(sums)):
        sums[d] = sums[d] * old + part_sums[d] * new
