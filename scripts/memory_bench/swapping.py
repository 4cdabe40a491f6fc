"""Swapping a preempted request against computing it again (paper, figure 19)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from statistics import median

from minipage import LLM, SamplingParams
from minipage.device import open_device
from minipage.device.kv_cache import KVCache

from . import paper
from .paged import PagedSystem
from .replay import OPT_13B, replay
from .report import Row
from .waste import BLOCK_SIZE, BLOCK_SIZES, Setting

NUM_TOKENS = 256  #: of the request that is preempted


def modelled() -> Iterator[Row]:
    """On the paper's machine, by the model of :class:`.replay.Machine`: one copy of K and one of V a block and layer."""
    yield Row("recompute_ms/modelled", 1e3 * OPT_13B.recompute_seconds(NUM_TOKENS), "ms", paper.RECOMPUTE_MS)
    for size in BLOCK_SIZES:
        seconds = 2 * OPT_13B.swap_seconds(NUM_TOKENS // size, size)
        yield Row(f"swap_ms/modelled/{size}", 1e3 * seconds, "ms", paper.SWAP_MS[size])


def in_a_replay(setting: Setting) -> Iterator[Row]:
    """Latency a token when the scheduler swaps, over that when it recomputes; the paper has them alike for blocks of 16 to 64."""
    latency = {}
    for swap in (False, True):
        system = PagedSystem(setting.num_slots, BLOCK_SIZE, swap=swap)
        latency[swap] = replay(system, setting.trace, block_size=BLOCK_SIZE).normalized_latency
    yield Row("swap/latency_vs_recompute", latency[True] / latency[False], "x")


def measured(model: str | None, device: str) -> Iterator[Row]:
    """On this machine, with a real model: its K and V of as many tokens out and in, one launch each way, and a prefill."""
    with LLM(model, device=device, num_blocks=2 * NUM_TOKENS // 16, enable_prefix_caching=False) as llm:
        params = SamplingParams(max_tokens=1, temperature=0)
        seconds = timed(lambda: llm.generate([1] * NUM_TOKENS, params, use_tqdm=False))
        yield Row("recompute_ms/measured", 1e3 * seconds, "ms")
        shape = llm.engine.runner.kv.shape
    opened = open_device(device)
    for size in BLOCK_SIZES:
        count = NUM_TOKENS // size
        pages = KVCache(opened, dataclasses.replace(shape, block_size=size), count, num_host_blocks=count)
        pairs = [(block, count - 1 - block) for block in range(count)]

        def swap(pages: KVCache = pages, pairs: list[tuple[int, int]] = pairs) -> None:
            with opened.compute():
                pages.swap_out(pairs)
                pages.swap_in(pairs)
                opened.synchronize()

        yield Row(f"swap_ms/measured/{size}", 1e3 * timed(swap), "ms")


def timed(call: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of a call: the median, after one to compile and warm up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
