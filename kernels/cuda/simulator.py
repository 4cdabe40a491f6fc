"""A faster and stricter scheduler for Numba's CUDA simulator.

Numba's own simulator runs each CUDA thread as an operating system thread, knows no warp operations, and lets many mistakes
pass. This one runs the threads of a block as greenlets, one after the other, each up to its next barrier or warp operation; and
the warps one after the other, each up to a barrier of the block, for nothing else keeps a warp from being far ahead of others:

* Warp shuffles, votes and ``syncwarp`` work.
* A barrier or warp operation that some thread never reaches, or threads that wait at different barriers, raise
  :class:`DivergenceError` and name the lines.
* Shared and local memory is full of NaN (integers: -1) when a block begins, so that what nobody wrote does not go unnoticed.
* ``MINIPAGE_SIMULATOR_SEED=n`` runs warps and threads in an order drawn from n instead of by number: a missing barrier that
  happens to do no harm in one order shows in another.

:func:`install` puts it in the place of Numba's; it needs NUMBA_ENABLE_CUDASIM=1 and greenlet.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextvars import copy_context
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel as numba_kernel
from numba.cuda.simulator import kernelapi as numba_api
from numba.cuda.simulator.cudadrv.devicearray import FakeWithinKernelCUDAArray

WARP = 32
ALL_LANES = 0xFFFFFFFF


class DivergenceError(RuntimeError):
    """Threads that must meet did not: a real GPU would hang, or compute nonsense."""


class Meeting(NamedTuple):
    """Where a thread waits for others: those of its block (``warp`` is None), or the ``lanes`` of its warp."""

    operation: str
    warp: int | None
    lanes: int
    file: str
    line: int


class SimulatedThread(greenlet):  # type: ignore[misc]
    """One CUDA thread; what Numba's simulator asks of ``threading.current_thread()`` is here."""

    def __init__(self, body: Callable[[], None], block: Any, position: Any, number: int) -> None:
        super().__init__(body)
        self.blockIdx, self.threadIdx, self.thread_id = block, position, number
        self.warp, self.lane = divmod(number, WARP)
        self.meeting: Meeting | None = None
        self.offer: Any = None
        self.offers: dict[int, Any] = {}
        self.gr_context = copy_context()  # the caller's np.errstate

    def meet(self, operation: str, warp: int | None, lanes: int, offer: Any, caller: FrameType) -> dict[int, Any]:
        """Wait for the others, and get what each of them offered, by thread number or lane."""
        self.meeting = Meeting(operation, warp, lanes, caller.f_code.co_filename, caller.f_lineno)
        self.offer = offer
        self.parent.switch()
        return self.offers

    def syncthreads(self) -> None:
        self.meet("syncthreads", None, 0, None, sys._getframe(2))

    def syncthreads_count(self, value: Any) -> int:
        return sum(map(bool, self.meet("syncthreads_count", None, 0, value, sys._getframe(2)).values()))

    def syncthreads_and(self, value: Any) -> int:
        return int(all(self.meet("syncthreads_and", None, 0, value, sys._getframe(2)).values()))

    def syncthreads_or(self, value: Any) -> int:
        return int(any(self.meet("syncthreads_or", None, 0, value, sys._getframe(2)).values()))


class ThreadBlock:
    """Runs the threads of one block; has the form of Numba's ``BlockManager``."""

    def __init__(self, function: Callable[..., None], grid_dim: Any, block_dim: Any, debug: bool) -> None:
        self._function, self._size = function, numba_api.Dim3(*block_dim)
        seed = os.environ.get("MINIPAGE_SIMULATOR_SEED")
        self._order = random.Random(int(seed)) if seed else None

    def run(self, grid_point: tuple[int, int, int], *args: Any) -> None:
        """Run block ``grid_point`` from its first thread to its last."""
        numba_kernel._get_kernel_context().shared._allocations.clear()
        block = numba_api.Dim3(*grid_point)
        arrays = tuple(_plain_array(arg) for arg in args)
        with np.errstate(all="ignore"):  # overflow and NaN are silent on a GPU
            threads = self._threads(block, lambda: self._function(*arrays))
            warps = [threads[first : first + WARP] for first in range(0, len(threads), WARP)]
            ready = threads
            while ready:
                if self._order:
                    self._order.shuffle(warps)
                for warp in warps:
                    self._run_warp(warp, len(threads))
                ready = self._released(threads, len(threads))
                waiting = [thread for thread in threads if not thread.dead]
                if waiting and not ready:
                    raise DivergenceError(self._describe(waiting, len(threads)))

    def _run_warp(self, warp: list[SimulatedThread], num_threads: int) -> None:
        """Run the threads of a warp, which may go on, as far as they come without the other warps."""
        ready = [thread for thread in warp if not thread.dead]
        while ready:
            if self._order:
                self._order.shuffle(ready)
            for thread in ready:
                self._resume(thread)
            ready = self._released(warp, num_threads)

    def _threads(self, block: Any, body: Callable[[], None]) -> list[SimulatedThread]:
        x, y, z = self._size
        positions = (numba_api.Dim3(i, j, k) for k in range(z) for j in range(y) for i in range(x))
        return [SimulatedThread(body, block, position, number) for number, position in enumerate(positions)]

    def _resume(self, thread: SimulatedThread) -> None:
        try:
            thread.switch()
        except Exception as error:
            error.add_note(f"in thread {thread.threadIdx} of block {thread.blockIdx}")
            raise

    def _released(self, threads: list[SimulatedThread], num_threads: int) -> list[SimulatedThread]:
        """Those of some of the block's threads whose meeting is complete, with what was offered there."""
        meetings: defaultdict[Meeting, list[SimulatedThread]] = defaultdict(list)
        for thread in threads:
            if not thread.dead:
                assert thread.meeting is not None
                meetings[thread.meeting].append(thread)
        released: list[SimulatedThread] = []
        for meeting, waiting in meetings.items():
            if len(waiting) == self._wanted(meeting, num_threads):
                offers = {t.thread_id if meeting.warp is None else t.lane: t.offer for t in waiting}
                for thread in waiting:
                    thread.offers = offers
                released += waiting
        return released

    def _wanted(self, meeting: Meeting, num_threads: int) -> int:
        if meeting.warp is None:
            return num_threads
        lanes_of_warp = min(WARP, num_threads - meeting.warp * WARP)
        return (meeting.lanes & ((1 << lanes_of_warp) - 1)).bit_count()

    def _describe(self, waiting: list[SimulatedThread], num_threads: int) -> str:
        meetings = Counter(thread.meeting for thread in waiting)
        waits = [f"{count} wait in {m.operation} at {m.file}:{m.line}" for m, count in meetings.items() if m]
        finished = num_threads - len(waiting)
        return f"of {num_threads} threads " + ", ".join(waits) + f", {finished} have returned"


def _plain_array(arg: Any) -> Any:
    """The NumPy array inside Numba's stand-in for a device array: indexing the stand-in is six times slower."""
    return arg._item._ary if isinstance(arg, FakeWithinKernelCUDAArray) else arg


def _poisoned(shape: Any, dtype: Any) -> np.ndarray:
    """An array full of NaN, or of -1."""
    if isinstance(dtype, numba_api.types.Type):
        dtype = numba_api.numpy_support.as_dtype(dtype)
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


def _placed(array: np.ndarray, alignment: int | None) -> np.ndarray:
    """A copy that begins at a multiple of ``alignment``, and of an element's size, but of nothing more."""
    unit = alignment or array.itemsize
    room = np.empty(array.nbytes + 2 * unit, np.uint8)
    first = (unit - room.ctypes.data) % (2 * unit)
    copy: np.ndarray = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
    """``cuda.shared.array``: one array for each place in the code that asks for one."""
    frame = sys._getframe(1)
    place = (frame.f_code, frame.f_lasti)
    if place not in self._allocations:
        self._allocations[place] = _placed(_poisoned(shape, dtype), alignment)
    return self._allocations[place]  # type: ignore[no-any-return]


def _local_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
    """``cuda.local.array``."""
    return _poisoned(shape, dtype)


def meet_in_warp(operation: str, mask: int, value: Any, depth: int = 2) -> dict[Any, Any]:
    """What the lanes of a warp offer, by lane, in one dict for all; the kernel is ``depth`` calls up from here."""
    thread: SimulatedThread = getcurrent()
    return thread.meet(operation, thread.warp, int(mask) & ALL_LANES, value, sys._getframe(depth))


def _shuffle(name: str, source: Callable[[int, int], int]) -> Callable[..., Any]:
    """A shuffle that reads lane ``source(own lane, argument)``; its own value where that lane is not of the warp."""

    def shuffle(self: Any, mask: int, value: Any, argument: int) -> Any:
        offers = meet_in_warp(name, mask, value)
        return offers.get(source(getcurrent().lane, int(argument)), value)

    return shuffle


def _vote(name: str, count: Callable[[dict[int, Any], Any], Any]) -> Callable[..., Any]:
    """A vote whose result is ``count(what each lane offers, own value)``."""

    def vote(self: Any, mask: int, value: Any) -> Any:
        return count(meet_in_warp(name, mask, value), value)

    return vote


def _syncwarp(self: Any, mask: int = ALL_LANES) -> None:
    meet_in_warp("syncwarp", mask, None)


def _bits(lanes: Iterable[int]) -> int:
    return sum(1 << lane for lane in lanes)


WARP_OPERATIONS: dict[str, Callable[..., Any]] = {
    "shfl_sync": _shuffle("shfl_sync", lambda lane, source: source % WARP),
    "shfl_xor_sync": _shuffle("shfl_xor_sync", lambda lane, bits: lane ^ bits),
    "shfl_down_sync": _shuffle("shfl_down_sync", lambda lane, delta: lane + delta),
    "shfl_up_sync": _shuffle("shfl_up_sync", lambda lane, delta: lane - delta),
    "all_sync": _vote("all_sync", lambda offers, own: all(offers.values())),
    "any_sync": _vote("any_sync", lambda offers, own: any(offers.values())),
    "ballot_sync": _vote("ballot_sync", lambda offers, own: _bits(lane for lane, v in offers.items() if v)),
    "match_any_sync": _vote(
        "match_any_sync", lambda offers, own: _bits(lane for lane, v in offers.items() if v == own)
    ),
    "syncwarp": _syncwarp,
}


class _Threading:
    """What Numba's ``kernelapi`` sees as ``threading``."""

    Lock = threading.Lock
    current_thread = staticmethod(getcurrent)


def install() -> None:
    """Make Numba's simulator run kernels with this scheduler, from now on in this process."""
    numba_kernel.BlockManager = ThreadBlock
    numba_api.threading = _Threading
    numba_api.FakeCUDAShared.array = _shared_array
    numba_api.FakeCUDALocal.array = _local_array
    for name, operation in WARP_OPERATIONS.items():
        setattr(numba_api.FakeCUDAModule, name, operation)
