"""A GPU without one: its memory, streams, events and graphs on the host, as unkind as CUDA allows.

* What is put on a stream happens when somebody waits for it, or for what comes after it, and not before: the host meets every
  buffer that it did not wait for as it was. Streams keep their order; the default stream and blocking ones wait for each other.
* Copies know addresses, not arrays. Memory is full of 0xFF (NaN, -1) when it is new, and again when it is freed: pinned memory at
  once, that of the GPU when its stream gets there. Work that touches freed memory raises.
* While a stream is captured its work is kept and does not happen; who waits, allocates or copies to or from the host raises, and
  so does who uses the default stream.

:mod:`.fake_arrays` has arrays of its memory, :mod:`.fake_cupy` makes CuPy of both.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 512  #: bytes at whose multiples memory begins, as in CuPy's pool


class GpuError(RuntimeError):
    """What CUDA would refuse, or what would read or write memory that is another's by then."""


class Block:
    """Bytes at an address, of the GPU's or pinned ones."""

    def __init__(self, size: int) -> None:
        room = np.empty(size + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        self.bytes, self.is_freed = room[first : first + size], False
        self.address = int(self.bytes.ctypes.data) if size else 0
        self.bytes[...] = 0xFF

    def free(self) -> None:
        self.bytes[...] = 0xFF
        self.is_freed = True


class Memory:
    """Whoever has it keeps its block, which is freed when nobody has."""

    def __init__(self, gpu: Gpu, size: int, stream: int | None = None) -> None:
        """Of the GPU, in the order of the stream at an address; pinned where that is None."""
        self.block = gpu.add(Block(size))
        self.ptr, self.size = self.block.address, size
        weakref.finalize(self, gpu.free, self.block, stream).atexit = False


class Step(NamedTuple):
    """A kernel or a copy: what happens, and to which memory."""

    name: str
    run: Callable[[], object]
    blocks: Sequence[Block] = ()

    def happen(self) -> None:
        if any(block.is_freed for block in self.blocks):
            raise GpuError(f"{self.name} uses memory that was freed")
        self.run()


class Work:
    """Steps that happen one after the other, when all other work has happened that they come after."""

    def __init__(self, number: int, steps: Sequence[Step], after: Iterable[Work | None]) -> None:
        self.number, self.steps, self.is_done = number, steps, False
        self.after = [work for work in after if work is not None and not work.is_done]

    @property
    def is_due(self) -> bool:
        return all(work.is_done for work in self.after)

    def happen(self) -> None:
        self.is_done = True
        for step in self.steps:
            step.happen()
        self.steps, self.after = (), []


class Line:
    """What is on one stream: the latest work, which comes after all the rest."""

    def __init__(self, waits_for_default: bool) -> None:
        self.waits_for_default = waits_for_default
        self.last: Work | None = None
        self.captured: list[Step] | None = None  #: where the stream is captured
        self.capturing_thread = 0


class Gpu:
    """All of a GPU's streams, by address, and its memory. 0 is CUDA's default stream."""

    def __init__(self) -> None:
        self.lines = {0: Line(waits_for_default=False)}
        self._streams: set[int] = set()  #: those that are there
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  #: theirs, sorted
        self._frees: list[Work] = []  #: memory of the GPU that is to be freed
        self._thread = threading.local()

    # ---- streams -----------------------------------------------------------------------------------------------------
    @property
    def current(self) -> int:
        """The current stream of this thread."""
        return self._currents[-1]

    @property
    def _currents(self) -> list[int]:
        if not hasattr(self._thread, "currents"):
            self._thread.currents = [0]
        currents: list[int] = self._thread.currents
        return currents

    def enter(self, stream: int) -> None:
        """Make a stream the current one of this thread, until :meth:`leave`."""
        self._currents.append(stream)

    def leave(self) -> None:
        self._currents.pop()

    def new_stream(self, is_blocking: bool) -> int:
        """The first address that no stream has, as a driver gives out those of streams that are gone."""
        self.refuse_in_capture("making a stream")
        with self._lock:
            address = next(i for i in itertools.count(4096, 16) if i not in self._streams)
            self._streams.add(address)
            self.lines.setdefault(address, Line(is_blocking)).waits_for_default = is_blocking
        return address

    def end_stream(self, stream: int) -> None:
        """Another may have its address; what is on it happens all the same."""
        self._streams.remove(stream)

    def put(self, stream: int, *steps: Step) -> Work | None:
        """Let steps happen after what the stream waits for; or keep them, where it is captured."""
        with self._lock:
            line = self.lines[stream]
            if line.captured is not None:
                line.captured += steps
                return None
            if stream == 0 and any(other.captured is not None and other.waits_for_default for other in self._others()):
                raise GpuError(f"{steps[0].name} on the default stream, which a stream that is captured waits for")
            line.last = Work(next(self._numbers), steps, self._before(stream))
            return line.last

    def _before(self, stream: int) -> list[Work | None]:
        """What the stream's next work comes after."""
        line = self.lines[stream]
        waits_for = [self.lines[0]] if line.waits_for_default else []
        if stream == 0:
            waits_for = [other for other in self._others() if other.waits_for_default]
        return [each.last for each in (line, *waits_for)]

    def _others(self) -> list[Line]:
        return [line for address, line in self.lines.items() if address]

    def begin_capture(self, stream: int) -> None:
        line = self.lines[stream]
        if stream == 0 or line.captured is not None:
            raise GpuError("the default stream, and one that is captured already, cannot be captured")
        line.captured, line.capturing_thread = [], threading.get_ident()

    def end_capture(self, stream: int) -> list[Step]:
        line = self.lines[stream]
        if line.captured is None:
            raise GpuError("the stream is not captured")
        captured, line.captured = line.captured, None
        return captured

    def refuse_in_capture(self, what: str) -> None:
        """Raise where this thread is capturing."""
        here = threading.get_ident()
        if any(line.captured is not None and line.capturing_thread == here for line in self.lines.values()):
            raise GpuError(f"{what} while a stream is captured")

    def finish(self, work: Work | None) -> None:
        """Let work happen with all that it comes after, in the order in which they were put; nothing else happens."""
        with self._lock:
            found: dict[int, Work] = {}
            reached = [work]
            while reached:
                each = reached.pop()
                if each is not None and not each.is_done and each.number not in found:
                    found[each.number] = each
                    reached += each.after
            self._free_what_is_due()
            for number in sorted(found):
                found[number].happen()
                self._free_what_is_due()

    def wait_for(self, stream: int) -> None:
        """Wait for all that is on a stream."""
        self.refuse_in_capture("waiting")
        self.finish(self.put(stream, Step("waiting", lambda: None)))

    def wait_for_all(self) -> None:
        """Wait for all streams."""
        self.refuse_in_capture("waiting")
        for line in list(self.lines.values()):
            self.finish(line.last)

    # ---- memory ------------------------------------------------------------------------------------------------------
    def add(self, block: Block) -> Block:
        self.refuse_in_capture("taking memory")
        with self._lock:
            if block.address:
                insort(self._addresses, block.address)
                self._blocks[block.address] = block
        return block

    def free(self, block: Block, stream: int | None) -> None:
        """Its addresses are nobody's from now on; what happens to be on its stream is still to use the bytes."""
        with self._lock:
            if block.address:
                del self._blocks[block.address]
                self._addresses.remove(block.address)
            before = () if stream is None else self._before(stream)
            self._frees.append(Work(next(self._numbers), [Step("freeing", block.free)], before))
            self._free_what_is_due()

    def _free_what_is_due(self) -> None:
        for each in self._frees.copy():
            if each.is_due:
                self._frees.remove(each)
                each.happen()

    @property
    def held_bytes(self) -> int:
        """Bytes that somebody has, pinned ones among them."""
        return sum(len(block.bytes) for block in self._blocks.values())

    def find(self, address: int, size: int) -> Block | None:
        """The block that has so many bytes there."""
        with self._lock:
            index = bisect(self._addresses, address) - 1
            block = self._blocks[self._addresses[index]] if index >= 0 else None
        return block if block is not None and address + size <= block.address + len(block.bytes) else None

    def view(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]
    ) -> tuple[np.ndarray, Block]:
        """What is at an address as an array, and its block."""
        spans = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
        size = 0 if 0 in shape else sum(spans) + np.dtype(dtype).itemsize
        block = self.find(address, size) if size else Block(0)
        if block is None:
            raise GpuError(f"an array of {size} bytes at {address:#x} is not in memory that somebody has")
        return np.ndarray(shape, dtype, block.bytes, address - block.address if size else 0, strides), block


class Graph:
    """The work of a captured stream, to be put on streams again and again; it keeps no memory."""

    def __init__(self, gpu: Gpu, steps: Sequence[Step]) -> None:
        self._gpu, self.steps = gpu, steps

    def launch(self, stream: Any = None) -> None:
        self._gpu.refuse_in_capture("launching a graph")
        self._gpu.put(self._gpu.current if stream is None else stream.ptr, *self.steps)


# ---- launches --------------------------------------------------------------------------------------------------------
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = (1024, 1024, 64)


def check_launch(grid: tuple[int, ...], threads: tuple[int, ...]) -> None:
    """Raise where CUDA would refuse a launch of so many blocks of so many threads."""
    for counts, most in ((grid, MOST_BLOCKS), (threads, MOST_THREADS)):
        if any(type(count) is not int or not 0 < count <= limit for count, limit in zip(counts, most, strict=False)):
            raise GpuError(f"{counts} blocks or threads are not allowed; allowed: 1 to {most}")
    if math.prod(threads) > MOST_THREADS[0]:
        raise GpuError(f"{threads} threads are not allowed; allowed: {MOST_THREADS[0]} together")
