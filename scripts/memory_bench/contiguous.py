"""The memory of systems that keep K and V of a request in one piece, as the paper models them (section 6.1, Orca)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .replay import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Iteration, Usage
from .trace import TraceRequest


class BuddyAllocator:
    """Power-of-two chunks of a row of slots, split in halves and joined again (Knuth, The Art of Computer Programming 2.5).

    A row whose length is no power of two begins as the chunks of its binary digits, the largest first.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        self._taken: dict[int, int] = {}  # address -> size
        address = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(address)
                address += size

    def allocate(self, num_slots: int) -> int | None:
        """The address of a chunk of at least ``num_slots`` slots, or None where none is large enough."""
        size = next_power_of_two(num_slots)
        found = size
        while not self._free.get(found):
            found *= 2
            if found not in self._free:
                return None
        address = min(self._free[found])
        self._free[found].remove(address)
        while found > size:
            found //= 2
            self._free[found].add(address + found)
        self._taken[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a chunk back, and join it with its buddy as long as that is free too."""
        size = self._taken.pop(address)
        while (address ^ size) in self._free[size]:
            self._free[size].remove(address ^ size)
            address &= ~size
            size *= 2
        self._free[size].add(address)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << (value - 1).bit_length()


def reserve_maximum(request: TraceRequest, max_length: int) -> int:
    """Orca (Max): the most that any sequence may need."""
    return max_length


def reserve_power_of_two(request: TraceRequest, max_length: int) -> int:
    """Orca (Pow2): the prompt, and room for the output that is too large by a factor of 2 at most."""
    return min(request.num_prompt_tokens + next_power_of_two(request.num_output_tokens), max_length)


def reserve_exactly(request: TraceRequest, max_length: int) -> int:
    """Orca (Oracle): what the request will need, as if that were known."""
    return request.num_tokens


Policy = Callable[[TraceRequest, int], int]
POLICIES: dict[str, Policy] = {
    "static_max": reserve_maximum,
    "static_pow2": reserve_power_of_two,
    "oracle": reserve_exactly,
}


@dataclass
class _Running:
    request: TraceRequest
    address: int
    reserved: int
    num_needed: int
    num_computed: int = 0


class ContiguousSystem:
    """Iteration-level scheduling (Orca, Yu et al. 2022) over contiguous allocations: first come, first served."""

    def __init__(self, num_slots: int, policy: Policy, max_length: int) -> None:
        self._num_slots = num_slots
        self._policy = policy
        self._max_length = max_length
        self._allocator = BuddyAllocator(num_slots)
        self._waiting: deque[TraceRequest] = deque()
        self._running: list[_Running] = []

    def add(self, request: TraceRequest) -> None:
        self._waiting.append(request)

    def step(self) -> Iteration | None:
        self._admit()
        if not self._running:
            return None
        num_tokens = 0
        finished = []
        for item in self._running:
            missing = max(item.request.num_prompt_tokens - item.num_computed, 1)
            count = min(missing, MAX_NUM_BATCHED_TOKENS - num_tokens)
            num_tokens += count
            item.num_computed += count
        usage = self._usage()
        for item in self._running:
            if item.num_computed == item.num_needed:
                self._allocator.free(item.address)
                finished.append(item.request)
        self._running = [item for item in self._running if item.num_computed < item.num_needed]
        return Iteration(num_tokens, int(usage.useful), 0, usage, finished)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < MAX_NUM_SEQS:
            request = self._waiting[0]
            reserved = self._policy(request, self._max_length)
            address = self._allocator.allocate(reserved)
            if address is None:
                return
            self._waiting.popleft()
            # Nothing follows the last token, so its K and V are never computed.
            self._running.append(_Running(request, address, reserved, request.num_tokens - 1))

    def _usage(self) -> Usage:
        useful = sum(item.num_computed for item in self._running)
        needed = sum(item.num_needed for item in self._running)
        reserved = sum(item.reserved for item in self._running)
        return Usage(useful, needed - useful, reserved - needed, self._num_slots - reserved, len(self._running))
