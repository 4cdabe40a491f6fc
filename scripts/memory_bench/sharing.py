"""Blocks that sequences share: of one prompt, and of a prefix that all prompts have (paper, figures 15 and 16)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import paper
from .contiguous import ContiguousSystem, reserve_exactly
from .paged import PagedSystem
from .replay import Usage, replay
from .report import Row
from .trace import Lengths, TraceRequest, Workload, at_once, made_up, with_prefix
from .waste import BLOCK_SIZE, Setting

WIDTHS = (2, 4, 6)

#: Sentences of the WMT16 news test set, English to German: about 22 words each, of 1.3 and 2 tokens a word. The paper prints
#: no lengths; these are estimates.
TRANSLATION = Workload("translation", Lengths(29.0, 15.0), Lengths(44.0, 23.0), rate=1.0)


def saved(usage: Usage) -> float:
    """Blocks saved by sharing, of the blocks that there would be without it (paper, section 6.3)."""
    return 1 - usage.held_blocks / usage.table_entries


def parallel(setting: Setting) -> Iterator[Row]:
    """Parallel sampling: n sequences share the full blocks of their prompt. From the first token of the trace to the last."""
    of_paper = paper.SAVED.get(("parallel", setting.workload), {})
    for n in WIDTHS:
        system = PagedSystem(setting.num_slots, BLOCK_SIZE, n=n)
        trace = [request for request in setting.trace if system.can_hold(request)]
        usage = replay(system, trace, block_size=BLOCK_SIZE, skip=0).usage
        yield Row(f"sharing/parallel/{setting.workload or 'trace'}/{n}", saved(usage), "fraction", of_paper.get(n))


def shared_prefix(num_requests: int, num_slots: int, seed: int) -> Iterator[Row]:
    """Translations with 1 and 5 examples before each sentence: blocks saved, and requests a second against Orca (Oracle)."""
    sentences = made_up(TRANSLATION, num_requests, 1024, seed)
    for num_tokens, speedup in paper.PREFIX_SPEEDUP.items():
        trace = at_once(with_prefix(sentences, num_tokens))
        paged = replay(PagedSystem(num_slots, BLOCK_SIZE, caching=True), trace, block_size=BLOCK_SIZE)
        oracle = replay(ContiguousSystem(num_slots, reserve_exactly, 2048), trace)
        yield Row(f"prefix/throughput_vs_oracle/{num_tokens}", paged.throughput / oracle.throughput, "x", speedup)
        yield Row(f"sharing/prefix/{num_tokens}", saved(paged.usage), "fraction")
        yield Row(f"concurrency/prefix/{num_tokens}/paged", paged.usage.running, "requests")
        yield Row(f"concurrency/prefix/{num_tokens}/oracle", oracle.usage.running, "requests")


def prefix_hits(trace: Sequence[TraceRequest], num_slots: int) -> Iterator[Row]:
    """Of a trace whose prompts begin alike, as Mooncake's do: the fraction of prompt tokens found in the prefix cache."""
    system = PagedSystem(num_slots, BLOCK_SIZE, caching=True)
    replay(system, trace, block_size=BLOCK_SIZE, skip=0)
    prompt_tokens = sum(request.num_prompt_tokens for request in trace)
    yield Row("prefix/hit_tokens", system.num_cached_tokens / prompt_tokens, "fraction")
