#!/usr/bin/env python3
"""What paging costs the attention kernel: the same kernel over pages and over contiguous K and V.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --contexts 512 2048 --block-sizes 16 --batches 1 --json kernels.json

One query a sequence, as in a decode step, with the heads of the demo model. "Contiguous" is the traditional cache: each
sequence is one block as long as its context. The pages of the paged cache lie in random order. Calls over one and the other
take turns, so that what else the machine does slows both, and the ratio is that of their medians; that of their fastest
calls is shown too. The paper has 1.20 to 1.26 (figure 18a: an A100, contexts of 64 to 256).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

import numpy as np
from bench_options import new_parser
from memory_bench.report import Row, table, write_json

from minipage.device import open_device
from minipage.device.base import Device
from minipage.device.contiguous import ContiguousKVCache
from minipage.device.kv_cache import KVCache, KVShape
from minipage.kernels.dtypes import convert

PAPER = 1.20  #: the least that the paper's kernel takes more than one over contiguous memory
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64  #: of the demo model
CALL_SECONDS = 0.0002  #: what is timed at once takes at least about so long; short enough to end mostly undisturbed


class Problem(NamedTuple):
    """``batch`` sequences of ``context`` tokens each, the last of which is the query."""

    batch: int
    context: int
    dtype: str  #: of K and V


def attention(
    device: Device, problem: Problem, cache: KVCache, tables: np.ndarray
) -> tuple[Callable[[], None], np.ndarray]:
    """A call of the kernel over ``cache``, filled with numbers that depend on sequence and position alone; and its output."""
    rng = np.random.default_rng(0)
    key, value, _ = cache.layer(0)
    size = cache.shape.block_size
    numbers = rng.standard_normal((2, problem.batch, problem.context, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32)
    for pages, tokens, axes in ((key, numbers[0], device.ops.KEY_AXES), (value, numbers[1], device.ops.VALUE_AXES)):
        for blocks, sequence in zip(tables, tokens, strict=True):
            contents = sequence.reshape(-1, size, NUM_KV_HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
            pages[blocks] = convert(contents.transpose(axes), problem.dtype)
    q = device.array(rng.standard_normal((problem.batch, NUM_HEADS, HEAD_DIM), dtype=np.float32))
    out = device.empty(q.shape, np.float32)
    context_lens = device.array(np.full(problem.batch, problem.context, np.int32))
    query_start = device.array(np.arange(problem.batch + 1, dtype=np.int32))
    block_tables = device.array(tables.astype(np.int32))

    def call() -> None:
        device.ops.paged_attention(out, q, key, value, block_tables, context_lens, query_start, HEAD_DIM**-0.5, 0, 0.0)

    return call, out


def shape(block_size: int, dtype: str) -> KVShape:
    """One layer of K and V."""
    return KVShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype=dtype)


def contiguous(device: Device, problem: Problem) -> tuple[Callable[[], None], np.ndarray]:
    """Attention over the traditional cache: a row a sequence."""
    cache = ContiguousKVCache(device, shape(problem.context, problem.dtype), problem.batch)
    rows = [cache.reserve() for _ in range(problem.batch)]
    return attention(device, problem, cache.pages, np.array(rows)[:, None])


def paged(device: Device, problem: Problem, block_size: int) -> tuple[Callable[[], None], np.ndarray]:
    """Attention over pages in random order."""
    blocks = problem.context // block_size
    cache = KVCache(device, shape(block_size, problem.dtype), problem.batch * blocks)
    tables = np.random.default_rng(1).permutation(problem.batch * blocks).reshape(problem.batch, blocks)
    return attention(device, problem, cache, tables)


def compare(device: Device, problem: Problem, block_sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """The time over pages of each size, over the time over contiguous K and V."""
    calls, outs = zip(contiguous(device, problem), *(paged(device, problem, size) for size in block_sizes), strict=True)
    with device.compute():
        times = interleaved(calls, rounds)
    where = f"c{problem.context}" + (f"/batch{problem.batch}" if problem.batch > 1 else "")
    yield Row(f"attention/contiguous_us/{where}", 1e6 * median(times[0]), "us")
    for size, out, seconds in zip(block_sizes, outs[1:], times[1:], strict=True):
        np.testing.assert_allclose(out, outs[0], atol=1e-4)  # the same attention, or the comparison says nothing
        ratio = median(seconds) / median(times[0])
        yield Row(f"attention/paged_over_contiguous/b{size}/{where}", ratio, "x", PAPER)
        yield Row(f"attention/paged_over_contiguous_best/b{size}/{where}", min(seconds) / min(times[0]), "x", PAPER)


def interleaved(calls: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds of each call in each round; they take turns."""
    for call in calls:  # compiles, and touches all memory
        call()
    start = time.perf_counter()
    calls[0]()
    repeats = max(1, round(CALL_SECONDS / (time.perf_counter() - start)))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds.append((time.perf_counter() - start) / repeats)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128], metavar="N", help="tokens of a block")
    contexts = [128, 256, 512, 1024, 2048, 4096]
    add("--contexts", type=int, nargs="+", default=contexts, metavar="N", help="tokens of a sequence, whole blocks")
    add("--batches", type=int, nargs="+", default=[1, 8], metavar="N", help="sequences that decode at once")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="of K and V")
    add("--rounds", type=int, default=101, metavar="N", help="calls of each, in turns; their median counts")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(arguments)
    if odd := [(c, b) for c in args.contexts for b in args.block_sizes if b < 1 or c < 1 or c % b]:
        parser.error(
            f"each of --contexts must be a multiple of each of --block-sizes; {odd[0][0]} is none of {odd[0][1]}"
        )
    if args.rounds < 1 or min(args.batches) < 1:
        parser.error(f"--rounds and --batches must be at least 1, got {args.rounds} and {args.batches}")
    device = open_device("cpu")
    rows = [
        row
        for batch in args.batches
        for context in args.contexts
        for row in compare(device, Problem(batch, context, args.dtype), args.block_sizes, args.rounds)
    ]
    print(table(rows))
    if args.json is not None:
        write_json(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
