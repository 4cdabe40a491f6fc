"""Replaying a trace through a memory system, with a clock that a model of the machine moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, Protocol

from minipage.errors import InvalidArgumentError

from .trace import TraceRequest

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048  #: of a step of every system, as engines have them by default


class Usage(NamedTuple):
    """What the KV slots of the machine are used for, and by how many; means over time are of the same form."""

    useful: float  #: slots that hold a token
    reserved: float  #: slots that will hold one before their request ends, and are kept for it
    internal: float  #: slots that no request will use, inside of what was allocated
    external: float  #: all others: what lies between allocations, or is free
    running: float  #: requests that have slots
    table_entries: float = 0.0  #: blocks that sequences name, each as often as it is named
    held_blocks: float = 0.0  #: blocks that sequences name, each once


class Iteration(NamedTuple):
    """What a system computed in a step, and how its memory was used meanwhile."""

    num_tokens: int  #: tokens computed
    num_context_tokens: int  #: tokens whose K and V attention read
    num_swapped_blocks: int
    usage: Usage
    finished: Sequence[TraceRequest]


class System(Protocol):
    """A server's memory with its scheduler."""

    def add(self, request: TraceRequest) -> None:
        """Queue a request."""

    def step(self) -> Iteration | None:
        """One iteration for all that can run; None where there is nothing to do."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for memory."""


@dataclass(frozen=True)
class Machine:
    """A model on a GPU, as far as the time of a step depends on it: a roofline (Williams et al. 2009).

    A step reads all weights, or is bound by arithmetic where it has many tokens; attention reads K and V; the host takes its
    time to schedule and launch.
    """

    num_parameters: float = 13e9
    weight_bytes: float = 26e9
    num_layers: int = 40
    kv_bytes_per_token: int = 2 * 40 * 5120 * 2  #: K and V, layers, hidden size, bytes of a float16 (paper, section 3)
    memory_bandwidth: float = 0.75 * 1555e9  #: bytes a second: an A100 40 GB, at three quarters of its peak
    arithmetic: float = 0.5 * 312e12  #: operations a second: half of the peak in float16
    overhead: float = 0.010  #: seconds
    # The link to host memory is that of the paper's machine: figure 19a tells both, as the two ends of its curve.
    link_bandwidth: float = 13.4e9  #: bytes a second
    copy_latency: float = 2.6e-6  #: seconds that a copy takes, however short

    def seconds(self, iteration: Iteration, block_size: int) -> float:
        """How long a step takes."""
        weights = self.weight_bytes / self.memory_bandwidth
        products = self.recompute_seconds(iteration.num_tokens)
        attention = iteration.num_context_tokens * self.kv_bytes_per_token / self.memory_bandwidth
        swapping = self.swap_seconds(iteration.num_swapped_blocks, block_size)
        return max(weights, products) + attention + swapping + self.overhead

    def recompute_seconds(self, num_tokens: int) -> float:
        """How long the products of ``num_tokens`` tokens take."""
        return 2 * self.num_parameters * num_tokens / self.arithmetic

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        """How long it takes to move blocks over the link one way, each as a copy of K and one of V a layer."""
        num_bytes = num_blocks * block_size * self.kv_bytes_per_token
        return num_bytes / self.link_bandwidth + num_blocks * 2 * self.num_layers * self.copy_latency


OPT_13B = Machine()
#: Token slots for KV: 12 GiB at 800 KiB a token (paper, table 1: 15.7K).
KV_SLOTS = 12 * 2**30 // OPT_13B.kv_bytes_per_token


@dataclass
class Measured:
    """What was seen while it was measured: means over time."""

    usage: Usage
    seconds: float = 0.0
    finished: int = 0
    latencies: list[float] = field(default_factory=list)  #: of finished requests, seconds an output token

    @property
    def throughput(self) -> float:
        """Requests finished a second."""
        return self.finished / self.seconds

    @property
    def normalized_latency(self) -> float:
        """Mean over requests of the time from arrival to end, over the tokens generated (paper, section 6.1)."""
        return fmean(self.latencies) if self.latencies else 0.0


def replay(system: System, trace: Sequence[TraceRequest], *, block_size: int = 1, skip: float = 0.5) -> Measured:
    """Feed requests as they arrive, until the last of them is admitted; ``block_size`` is that of swaps.

    It is measured once ``skip`` of all requests are admitted, when memory has filled. With ``skip`` 0 all is, until the last
    request ends.
    """
    now, arrived = 0.0, 0
    total = [0.0] * len(Usage._fields)
    measured = Measured(Usage(*total))
    while arrived < len(trace) or system.num_waiting or not skip:
        while arrived < len(trace) and trace[arrived].arrival <= now:
            system.add(trace[arrived])
            arrived += 1
        iteration = system.step()
        if iteration is None:
            if arrived == len(trace):
                break
            now = trace[arrived].arrival
            continue
        seconds = OPT_13B.seconds(iteration, block_size)
        now += seconds
        if arrived - system.num_waiting > skip * len(trace):
            total = [old + seconds * new for old, new in zip(total, iteration.usage, strict=True)]
            measured.seconds += seconds
            measured.finished += len(iteration.finished)
            measured.latencies += [(now - each.arrival) / each.num_output_tokens for each in iteration.finished]
    if not measured.finished:
        raise InvalidArgumentError(f"{len(trace)} requests are too few to fill the memory; allowed are more")
    measured.usage = Usage(*(value / measured.seconds for value in total))
    return measured
