"""How much of the KV memory holds tokens, and how many requests run at once (paper, figures 2 and 13)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import paper
from .contiguous import POLICIES, ContiguousSystem
from .paged import PagedSystem
from .replay import Measured, System, Usage, replay
from .report import Row
from .trace import TraceRequest, at_once

BLOCK_SIZE = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KINDS = ("useful", "reserved", "internal", "external")


class Setting(NamedTuple):
    """A trace, and the memory that it is replayed in."""

    trace: Sequence[TraceRequest]
    num_slots: int
    max_length: int
    name: str  #: part of the names of rows; "" for the main trace
    workload: str  #: whose numbers of the paper stand beside; "" for none

    def row(self, kind: str, what: str, value: float, unit: str, reference: float | None = None) -> Row:
        """A row of this trace: kind/[name/]what."""
        return Row("/".join(filter(None, (kind, self.name, what))), value, unit, reference)


def systems(setting: Setting) -> dict[str, System]:
    """The four systems that are compared, empty."""
    slots, longest = setting.num_slots, setting.max_length
    contiguous = {name: ContiguousSystem(slots, policy, longest) for name, policy in POLICIES.items()}
    return {"paged": PagedSystem(slots, BLOCK_SIZE), **contiguous}


def waste(setting: Setting) -> Iterator[Row]:
    """What slots are used for and how many requests run, while others always wait: nothing but memory is the limit.

    Fractions are of all slots, but for ``useful_kv/paged``: that is of the blocks held, as free ones can serve any request.
    """
    trace = at_once(setting.trace)
    measured = {name: replay(system, trace, block_size=BLOCK_SIZE) for name, system in systems(setting).items()}
    yield from paged_rows(setting, BLOCK_SIZE, measured["paged"].usage)
    for name in POLICIES:
        of_paper = paper.WASTE[name] if setting.workload == "sharegpt" else (None,) * len(KINDS)
        for kind, value, reference in zip(KINDS, measured[name].usage, of_paper, strict=False):
            yield setting.row(f"{kind}_kv", name, value / setting.num_slots, "fraction", reference)
    yield from comparison(setting, measured)


def block_sizes(setting: Setting) -> Iterator[Row]:
    """Useful memory and requests at once for the other block sizes (the paper's figure 18b has the latency)."""
    for size in BLOCK_SIZES:
        if size != BLOCK_SIZE:
            usage = replay(PagedSystem(setting.num_slots, size), at_once(setting.trace), block_size=size).usage
            yield from paged_rows(setting, size, usage)
            yield setting.row("concurrency", f"paged/{size}", usage.running, "requests")


def paged_rows(setting: Setting, size: int, usage: Usage) -> Iterator[Row]:
    """Fractions of the blocks held, and of all slots."""
    main = size == BLOCK_SIZE and setting.workload == "sharegpt"
    held = usage.held_blocks * size
    yield setting.row(
        "useful_kv", f"paged/{size}", usage.useful / held, "fraction", paper.USEFUL_PAGED if main else None
    )
    yield setting.row("useful_kv_of_all", f"paged/{size}", usage.useful / setting.num_slots, "fraction")


def comparison(setting: Setting, measured: dict[str, Measured]) -> Iterator[Row]:
    """Requests at once, how many times as many they are with paging, and how many times as many are finished a second."""
    of_paper = paper.CONCURRENCY.get(setting.workload, {})
    for name, each in measured.items():
        yield setting.row("concurrency", name, each.usage.running, "requests", of_paper.get(name))
    paged = measured["paged"]
    for label, name in (("vs_oracle", "oracle"), ("vs_pow2", "static_pow2"), ("vs_max", "static_max")):
        reference = of_paper["paged"] / of_paper[name] if of_paper else None
        yield setting.row("concurrency", label, paged.usage.running / measured[name].usage.running, "x", reference)
        reference = paper.REQUEST_RATE.get((setting.workload, name))
        yield setting.row("throughput", label, paged.throughput / measured[name].throughput, "x", reference)
