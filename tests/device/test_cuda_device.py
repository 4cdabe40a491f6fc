"""A CUDA device as far as it can be wrong without a GPU: on stand-ins for CuPy's streams, events and arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minipage.device import Communicator, cuda


class FakeStream:
    """A stream on which copies are made as late as can be; it notes who makes it the current one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.queue: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.calls.append("stream")

    def __exit__(self, *error: Any) -> None:
        self.calls.append("left")

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=None)


def unopened_device(xp: Any) -> Any:
    """A CUDA device on a stand-in for CuPy."""
    device = object.__new__(cuda.CudaDevice)
    device.xp, device._stream, device._unread = xp, FakeStream(), []
    return device


def test_a_recording_keeps_its_arrays() -> None:
    """A graph knows addresses alone: were the arrays freed, it would write to what others have by then."""
    device, array = unopened_device(None), np.zeros(3)
    kept = weakref.ref(array)
    run = device.record(partial(array.fill, 1))
    del array
    assert kept() is not None
    del run
    assert kept() is None


class FakeEvent:
    """It has happened when all has that was on its stream when it was recorded."""

    def __init__(self, disable_timing: bool) -> None:
        self.due: list[Callable[[], None]] = []
        self.done = False

    def record(self, stream: FakeStream) -> None:
        self.due = list(stream.queue)

    def synchronize(self) -> None:
        for copy in self.due:
            copy()


class FakeArray:
    """An array on a GPU."""

    def __init__(self, contents: np.ndarray) -> None:
        self.contents, self.nbytes = contents, contents.nbytes
        self.dtype, self.shape = contents.dtype, contents.shape

    def set(self, source: np.ndarray, stream: FakeStream) -> None:
        stream.queue.append(lambda: self.contents.__setitem__(..., source))

    def get(self, stream: FakeStream, out: np.ndarray, blocking: bool) -> None:
        assert not blocking
        contents = self.contents.copy()
        stream.queue.append(lambda: out.__setitem__(..., contents))


def fake_copies() -> Any:
    """CuPy as far as copies need it."""
    return SimpleNamespace(cuda=SimpleNamespace(Event=FakeEvent, alloc_pinned_memory=bytearray))


def test_who_waits_for_a_copy_waits_for_all_of_it() -> None:
    """Copies either way go to the device's stream, and what is waited for comes after them there."""
    device, array = unopened_device(fake_copies()), FakeArray(np.arange(6, dtype=np.float32).reshape(2, 3))
    read = device.fetch(array)
    assert len(device._stream.queue) == 1
    assert read().tolist() == [[0, 1, 2], [3, 4, 5]] and read().dtype == np.float32
    source = device.staging(24).view(np.float32).reshape(2, 3)
    source[:] = 7
    wait = device.send(array, source)
    assert len(device._stream.queue) == 2
    wait()
    assert array.contents.tolist() == [[7, 7, 7], [7, 7, 7]]


def test_ops_run_on_the_devices_own_gpu_and_stream() -> None:
    """Both are the current ones of the thread meanwhile."""
    device = unopened_device(None)
    device._device = FakeStream()
    with device.compute():
        assert device._device.calls == device._stream.calls == ["stream"]
    assert device._device.calls == device._stream.calls == ["stream", "left"]


def test_a_pool_on_the_host_is_pinned_as_long_as_it_is_used() -> None:
    """The array owns the memory that it was made from."""
    taken: list[Any] = []

    def pin(size: int) -> Any:
        taken.append(SimpleNamespace(ptr=4096, size=size))
        return taken[-1]

    memory = SimpleNamespace(PinnedMemory=pin, UnownedMemory=lambda *given: given, MemoryPointer=lambda *given: given)
    device = unopened_device(SimpleNamespace(cuda=memory, ndarray=lambda *given: given))
    shape, dtype, ((pointer, size, owner), offset) = device.empty_host([2, 3, 4], np.float16)
    assert (shape, dtype, pointer, offset) == ((2, 3, 4), np.float16, 4096, 0)
    assert size == taken[0].size == 48 and owner is taken[0]


def test_ranks_with_gpus_talk_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI would take their arrays for host memory. A rank alone needs none of it."""
    made: list[Any] = []
    monkeypatch.setattr(cuda, "NcclCommunicator", lambda mpi: made.append(mpi) or "nccl")
    device, communicator = unopened_device(None), object.__new__(cuda.MpiCommunicator)
    communicator.mpi = "world"
    device.join(communicator)
    assert device.communicator == "nccl" and made == ["world"]
    device.join(alone := Communicator())
    assert device.communicator is alone and made == ["world"]


def test_a_closed_device_keeps_no_memory() -> None:
    """What CuPy's pool holds and nobody uses goes back to the GPU."""
    freed: list[str] = []
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append("all"))
    unopened_device(SimpleNamespace(get_default_memory_pool=lambda: pool)).close()
    assert freed == ["all"]
