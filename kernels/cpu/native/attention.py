"""PagedAttention (Kwon et al. 2023, section 4.3): attention that reads K and V where they lie, block by block.

A task is a run of a few queries of one sequence, with all the query heads that share one kv head; each query and head is a row
of the task, and the pages are read once for all of them. A row's context is cut into parts at fixed absolute positions; each
part has a softmax of its own (Dao et al. 2022), and the parts are merged in order. So a query's result has the same bits
whichever others share its task, its step and its batch; and parts of a long context can go to different threads
(flash-decoding), which changes no bit either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...ops import Array
from .. import partition
from .microkernel import multiply
from .pages import read_ahead, scale_keys, scale_values
from .share import Share, inner, take
from .softmax import exponentials

part_size, run_length = inner(partition.part_size), inner(partition.run_length)


class Rows(NamedTuple):
    """The queries, as the window meets them and as the sinks do, and their results, all [T, NH, D]."""

    out: Array
    q: Array
    sink_q: Array


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


class Run(NamedTuple):
    """Queries first .. end of a sequence, the first of which stands at ``position``."""

    sequence: int
    first: int
    end: int
    position: int


def paged_attention(
    out: Array,
    q: Array,
    sink_q: Array,
    key_cache: Array,
    value_cache: Array,
    block_size: int,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    scale: float,
    window: int,
    soft_cap: float,
    num_sinks: int,
    queries: Array,
    scores: Array,
    sums: Array,
    softmax: Array,
    seen: Array,
    partial: Array,
    share: Share,
) -> None:
    """See :class:`minipage.kernels.ops.Ops`; from ``queries`` on memory to work in, a slice a thread.

    ``partial`` [n, D + 2] is for parts that are merged afterwards by :func:`merge`: sums, largest score, sum of weights.
    """
    rows = Rows(out, q, sink_q)
    pages = Pages(key_cache, value_cache, block_size)
    scoring = Scoring(scale, window, soft_cap, num_sinks)
    thread = share[0]
    room = Room(queries[thread], scores[thread], sums[thread], softmax[thread], seen[thread])
    kv_heads = key_cache.shape[1]
    length = run_length(q.shape[1] // kv_heads)
    num_runs = _count_runs(query_start, length)
    parts = parts_to_share(q.shape, kv_heads, num_runs, context_lens, block_size, num_sinks, len(partial), share)
    sequence = runs_before = 0
    task = take(share, 1)
    while task < num_runs * kv_heads * max(parts, 1):
        run = task // (kv_heads * max(parts, 1))
        while run >= runs_before + _runs_of(query_start, sequence, length):  # tasks are taken in ascending order
            runs_before += _runs_of(query_start, sequence, length)
            sequence += 1
        first = query_start[sequence] + (run - runs_before) * length
        end = min(first + length, query_start[sequence + 1])
        # The queries of a sequence are the last tokens of its context.
        here = Run(sequence, first, end, context_lens[sequence] - (query_start[sequence + 1] - first))
        if parts > 0:
            head, part = task // parts % kv_heads, task % parts
            _attend_part(rows, pages, block_tables[sequence], scoring, here, head, part, parts, partial, room)
        else:
            _attend(rows, pages, block_tables[sequence], scoring, here, task % kv_heads, room)
        task = take(share, 1)


@inner
def _runs_of(query_start: Array, sequence: int, length: int) -> int:
    count: int = (query_start[sequence + 1] - query_start[sequence] + length - 1) // length
    return count


@inner
def _count_runs(query_start: Array, length: int) -> int:
    count = 0
    for sequence in range(len(query_start) - 1):
        count += _runs_of(query_start, sequence, length)
    return count


# ---- a task whole ------------------------------------------------------------------------------------------------------


@inner
def _attend(rows: Rows, pages: Pages, table: Array, scoring: Scoring, run: Run, head: int, room: Room) -> None:
    group = rows.q.shape[1] // pages.keys.shape[1]
    num_rows = (run.end - run.first) * group
    head_dim = rows.q.shape[2]
    size = part_size(pages.block_size)
    sums, softmax = room.sums[0], room.softmax[0]
    for row in range(num_rows):
        softmax[row, 0], softmax[row, 1] = -np.inf, 0
        for d in range(head_dim):
            sums[row, d] = 0
    for section in range(0 if scoring.num_sinks > 0 else 1, 2):  # the sinks, and then the window
        _take_queries(rows, scoring, run, head, group, section, room)
        begin, stop = room.seen[0, 0], room.seen[num_rows - 1, 1]
        for start in range(begin // size * size, stop, size):
            _reduce(pages, head, table, scoring, num_rows, head_dim, start, min(start + size, stop), room)
            for row in range(num_rows):
                _merge_row(sums[row], softmax[row], room.sums[1, row], room.softmax[1, row, 0], room.softmax[1, row, 1])
    for row in range(num_rows):
        _write(rows.out[run.first + row // group, head * group + row % group], sums[row], softmax[row, 1])


@inner
def _take_queries(rows: Rows, scoring: Scoring, run: Run, head: int, group: int, section: int, room: Room) -> None:
    """Copy the queries of a task aside, and say what each sees of the sinks (section 0) or of the window (1)."""
    for row in range((run.end - run.first) * group):
        query = row // group
        stop = run.position + query + 1
        sinks = min(scoring.num_sinks, stop)
        if section == 0:
            room.seen[row, 0], room.seen[row, 1] = 0, sinks
            source = rows.sink_q[run.first + query, head * group + row % group]
        else:
            room.seen[row, 0] = max(stop - scoring.window, sinks) if scoring.window > 0 else sinks
            room.seen[row, 1] = stop
            source = rows.q[run.first + query, head * group + row % group]
        for d in range(len(source)):
            room.queries[row, d] = source[d]


@inner
def _merge_row(sums: Array, softmax: Array, part_sums: Array, part_largest: Any, part_total: Any) -> None:
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


@inner
def _write(out: Array, sums: Array, total: Any) -> None:
    for d in range(len(out)):
        out[d] = sums[d] / total


# ---- a part of a task --------------------------------------------------------------------------------------------------


@inner
def _reduce(
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
        ahead = read_ahead(page, pages.keys[table[min(block + 1, last)], head])
        _score(num_rows, room.queries, page[:head_dim], scores[:, column : column + block_size], ahead)
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
        ahead = read_ahead(page, pages.values[table[min(block + 1, last)], head])
        scale_values(page, scores[:num_rows, column : column + block_size], head_dim, block_size)
        _add_values(num_rows, sums, scores[:, column:], page[:, :head_dim], room.seen, block * block_size, ahead)


@inner
def _cap(scores: Array, scale: Any, soft_cap: Any) -> None:
    for t in range(len(scores)):
        scores[t] = soft_cap * np.float32(np.tanh(scores[t] * scale / soft_cap))


@inner
def _score(num_rows: int, queries: Array, keys: Array, scores: Array, ahead: int) -> None:
    """scores [rows, B] = queries [rows, D] @ keys [D, B]."""
    columns, row = keys.shape[1], 0
    while row + 4 <= num_rows:
        multiply(4, columns, False, queries[row:], keys, scores[row:], ahead)
        row += 4
    left = num_rows - row
    if left == 3:
        multiply(3, columns, False, queries[row:], keys, scores[row:], ahead)
    elif left == 2:
        multiply(2, columns, False, queries[row:], keys, scores[row:], ahead)
    elif left == 1:
        multiply(1, columns, False, queries[row:], keys, scores[row:], ahead)


@inner
def _add_values(num_rows: int, sums: Array, weights: Array, values: Array, seen: Array, start: int, ahead: int) -> None:
    """Add weights @ values of the block that begins at token ``start`` to the sums of the rows.

    Each row takes the tokens that it sees: a slot that it does not see may hold NaN, which no weight of 0 would undo.
    """
    row = 0
    while row < num_rows:
        count = min(4, num_rows - row)
        first, end = max(seen[row, 0] - start, 0), min(seen[row, 1] - start, len(values))
        alike = 1
        while alike < count and (
            max(seen[row + alike, 0] - start, 0) == first and min(seen[row + alike, 1] - start, len(values)) == end
        ):
            alike += 1
        if first < end:
            _weigh(alike, weights[row:, first:end], values[first:end], sums[row:], ahead)
        row += alike


@inner
def _weigh(count: int, weights: Array, values: Array, sums: Array, ahead: int) -> None:
    if count == 4:
        multiply(4, values.shape[1], True, weights, values, sums, ahead)
    elif count == 3:
        multiply(3, values.shape[1], True, weights, values, sums, ahead)
    elif count == 2:
        multiply(2, values.shape[1], True, weights, values, sums, ahead)
    else:
        multiply(1, values.shape[1], True, weights, values, sums, ahead)


# ---- parts on many threads ---------------------------------------------------------------------------------------------


@inner
def parts_to_share(
    shape: tuple[int, int, int],
    kv_heads: int,
    num_runs: int,
    context_lens: Array,
    block_size: int,
    num_sinks: int,
    room: int,
    share: Share,
) -> int:
    """The most parts that a task has, where tasks are too few to keep all threads busy with whole ones; else 0.

    ``shape`` is that of the queries. Attention sinks are not shared out: their contexts are short.
    """
    if share[1] == 1 or num_runs * kv_heads >= 8 * share[1] or num_sinks > 0:
        return 0
    longest = 0
    for s in range(len(context_lens)):
        longest = max(longest, context_lens[s])
    size = part_size(block_size)
    parts = (longest + size - 1) // size
    fits = num_runs * run_length(shape[1] // kv_heads) * shape[1] * parts <= room
    return parts if fits and parts > 1 else 0


@inner
def _attend_part(
    rows: Rows,
    pages: Pages,
    table: Array,
    scoring: Scoring,
    run: Run,
    head: int,
    part: int,
    parts: int,
    partial: Array,
    room: Room,
) -> None:
    group = rows.q.shape[1] // pages.keys.shape[1]
    num_rows = (run.end - run.first) * group
    head_dim = rows.q.shape[2]
    start = part * part_size(pages.block_size)
    _take_queries(rows, scoring, run, head, group, 1, room)
    stop = min(start + part_size(pages.block_size), room.seen[num_rows - 1, 1])
    is_seen = room.seen[0, 0] < stop and start < stop
    if is_seen:
        _reduce(pages, head, table, scoring, num_rows, head_dim, start, stop, room)
    for row in range(num_rows):
        entry = partial[((run.first + row // group) * rows.q.shape[1] + head * group + row % group) * parts + part]
        for d in range(head_dim):
            entry[d] = room.sums[1, row, d] if is_seen else np.float32(0)
        entry[head_dim] = room.softmax[1, row, 0] if is_seen else np.float32(0)
        entry[head_dim + 1] = room.softmax[1, row, 1] if is_seen else np.float32(0)


def merge(
    out: Array,
    kv_heads: int,
    block_size: int,
    context_lens: Array,
    query_start: Array,
    num_sinks: int,
    sums: Array,
    softmax: Array,
    partial: Array,
    share: Share,
) -> None:
    """Merge what :func:`paged_attention` left in ``partial``, if it did: part by part, as one task would have done."""
    num_runs = _count_runs(query_start, run_length(out.shape[1] // kv_heads))
    parts = parts_to_share(out.shape, kv_heads, num_runs, context_lens, block_size, num_sinks, len(partial), share)
    if parts == 0:
        return
    total, state = sums[share[0], 0, 0], softmax[share[0], 0, 0]
    head_dim = out.shape[2]
    row = take(share, 1)
    while row < out.shape[0] * out.shape[1]:
        state[0], state[1] = -np.inf, 0
        for d in range(head_dim):
            total[d] = 0
        for part in range(parts):
            entry = partial[row * parts + part]
            _merge_row(total, state, entry[:head_dim], entry[head_dim], entry[head_dim + 1])
        _write(out[row // out.shape[1], row % out.shape[1]], total, state[1])
        row = take(share, 1)
