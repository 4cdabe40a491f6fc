"""PagedAttention (Kwon et al. 2023, section 4.3): attention that reads K and V where they lie, block by block.

A task is a run of a few queries of one sequence, with all the query heads that share one kv head; each query and head is a row
of the task, and the pages are read once for all of them. A row's context is cut into parts at fixed absolute positions; each
part has a softmax of its own (Dao et al. 2022), and the parts are merged in order. So a query's result has the same bits
whichever others share its task, its step and its batch; and parts of a long context can go to different threads
(flash-decoding), which changes no bit either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...ops import Array
from .. import partition
from .attention_part import Pages, Room, Scoring, merge_row, reduce_of
from .share import Share, inner, part

part_size, run_length = inner(partition.part_size), inner(partition.run_length)


class Rows(NamedTuple):
    """The queries, as the window meets them and as the sinks do, and their results, all [T, NH, D]."""

    out: Array
    q: Array
    sink_q: Array


class Run(NamedTuple):
    """Queries first .. end of a sequence, the first of which stands at ``position``."""

    sequence: int
    first: int
    end: int
    position: int


def paged_attention_of(many: int, few: int, token_lanes: int, dim_lanes: int) -> Callable[..., None]:
    """The kernel for these constants of :func:`.attention_part.reduce_of`."""
    reduce = reduce_of(many, few, token_lanes, dim_lanes)

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
        few_tasks: int,
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
        thread = share[2]
        room = Room(queries[thread], scores[thread], sums[thread], softmax[thread], seen[thread])
        kv_heads = key_cache.shape[1]
        length = run_length(q.shape[1] // kv_heads)
        num_runs = _count_runs(query_start, length)
        parts = parts_to_share(
            q.shape, kv_heads, num_runs, context_lens, block_size, num_sinks, len(partial), few_tasks
        )
        sequence = runs_before = 0
        first_task, last_task = part(num_runs * kv_heads * max(parts, 1), share)
        for task in range(first_task, last_task):
            run = task // (kv_heads * max(parts, 1))
            while run >= runs_before + _runs_of(query_start, sequence, length):
                runs_before += _runs_of(query_start, sequence, length)
                sequence += 1
            first = query_start[sequence] + (run - runs_before) * length
            end = min(first + length, query_start[sequence + 1])
            # The queries of a sequence are the last tokens of its context.
            here = Run(sequence, first, end, context_lens[sequence] - (query_start[sequence + 1] - first))
            table = block_tables[sequence]
            which = task % parts if parts > 0 else -1
            head = task // max(parts, 1) % kv_heads
            _attend(reduce, rows, pages, table, scoring, here, head, which, parts, partial, room)

    return paged_attention


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


# ---- a task ------------------------------------------------------------------------------------------------------------


@inner
def _attend(
    reduce: Callable[..., None],
    rows: Rows,
    pages: Pages,
    table: Array,
    scoring: Scoring,
    run: Run,
    head: int,
    which: int,
    parts: int,
    partial: Array,
    room: Room,
) -> None:
    """A run of queries and a kv head, whole; or, if ``which`` is not negative, one of its ``parts``, left in ``partial``."""
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
        begin, stop = room.seen[0, 0] // size * size, room.seen[num_rows - 1, 1]
        if which >= 0:
            begin, stop = max(begin, which * size), min(stop, (which + 1) * size)
        for start in range(begin, stop, size):
            reduce(pages, head, table, scoring, num_rows, head_dim, start, min(start + size, stop), room)
            for row in range(num_rows):
                merge_row(sums[row], softmax[row], room.sums[1, row], room.softmax[1, row, 0], room.softmax[1, row, 1])
    for row in range(num_rows):
        query, query_head = run.first + row // group, head * group + row % group
        if which < 0:
            _write(rows.out[query, query_head], sums[row], softmax[row, 1])
        else:
            _save(partial[(query * rows.q.shape[1] + query_head) * parts + which], sums[row], softmax[row])


@inner
def _save(entry: Array, sums: Array, softmax: Array) -> None:
    for d in range(len(sums)):
        entry[d] = sums[d]
    entry[len(sums)], entry[len(sums) + 1] = softmax[0], softmax[1]


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
def _write(out: Array, sums: Array, total: Any) -> None:
    for d in range(len(out)):
        out[d] = sums[d] / total


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
    few_tasks: int,
) -> int:
    """The most parts that a task has, where there are fewer than ``few_tasks``, which threads could not share well; else 0.

    ``shape`` is that of the queries. Attention sinks are not shared out: their contexts are short.
    """
    if num_runs * kv_heads >= few_tasks or num_sinks > 0:
        return 0
    longest = 0
    for s in range(len(context_lens)):
        longest = max(longest, context_lens[s])
    size = part_size(block_size)
    parts = (longest + size - 1) // size
    fits = num_runs * run_length(shape[1] // kv_heads) * shape[1] * parts <= room
    return parts if fits and parts > 1 else 0


def merge(
    out: Array,
    kv_heads: int,
    block_size: int,
    context_lens: Array,
    query_start: Array,
    num_sinks: int,
    few_tasks: int,
    sums: Array,
    softmax: Array,
    partial: Array,
    share: Share,
) -> None:
    """Merge what :func:`paged_attention` left in ``partial``, if it did: part by part, as one task would have done."""
    num_runs = _count_runs(query_start, run_length(out.shape[1] // kv_heads))
    parts = parts_to_share(out.shape, kv_heads, num_runs, context_lens, block_size, num_sinks, len(partial), few_tasks)
    if parts == 0:
        return
    total, state = sums[share[2], 0, 0], softmax[share[2], 0, 0]
    head_dim = out.shape[2]
    first, last = part(out.shape[0] * out.shape[1], share)
    for row in range(first, last):
        state[0], state[1] = -np.inf, 0
        for d in range(head_dim):
            total[d] = 0
        for i in range(parts):
            entry = partial[row * parts + i]
            merge_row(total, state, entry[:head_dim], entry[head_dim], entry[head_dim + 1])
        _write(out[row // out.shape[1], row % out.shape[1]], total, state[1])
