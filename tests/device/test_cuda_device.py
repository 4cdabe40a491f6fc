"""A CUDA device as far as it can be wrong without a GPU: on a stand-in where all happens as late as CUDA allows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import fake_cupy
from helpers.fake_gpu import Gpu, GpuError

from minipage.device import Communicator, cuda, open_device


@pytest.fixture
def device(gpu: Gpu) -> Any:
    return open_device("cuda")


def numbers(device: Any, *values: float) -> Any:
    """A row of float32 on the device."""
    return device.array(np.array([values], np.float32))


def adding(device: Any, x: Any, y: Any) -> Callable[[], None]:
    """x += y"""
    return lambda: device.ops.add(x, x, y)


# ---- recordings ------------------------------------------------------------------------------------------------------


def test_ops_run_once_when_they_are_recorded_and_once_whenever_they_are_run(device: Any) -> None:
    """What a first call compiles or allocates cannot be captured; capturing runs nothing."""
    x, one = numbers(device, 0, 10), numbers(device, 1, 1)
    with device.compute():
        run = device.record(adding(device, x, one))
        assert device.host(x).tolist() == [[1, 11]]
        run()
        run()
        assert device.host(x).tolist() == [[3, 13]]


def test_others_may_use_the_default_stream_while_ops_are_recorded(device: Any) -> None:
    """To load a second model, for instance."""
    x, one, loaded = numbers(device, 0), numbers(device, 1), []

    def ops() -> None:
        adding(device, x, one)()
        other = threading.Thread(target=lambda: loaded.append(numbers(device, 7)))
        other.start()
        other.join()

    with device.compute():
        device.record(ops)()
        assert device.host(x).tolist() == [[2]]
    assert [device.host(each).tolist() for each in loaded] == [[[7]], [[7]]]


def test_a_recording_comes_after_what_was_begun_before_it(device: Any) -> None:
    """On the device's stream, and on the default one, where models are loaded."""
    with device.compute():
        x, one = numbers(device, 0), numbers(device, 1)
        adding(device, x, one)()
    two = numbers(device, 2)
    with device.compute():
        run = device.record(adding(device, x, two))
        assert device.host(x).tolist() == [[3]]
        run()
        assert device.host(x).tolist() == [[5]]


def test_a_recording_may_allocate_at_its_first_run_only(device: Any) -> None:
    """Scratch memory of ops, for instance, which is there from then on."""
    kept: list[Any] = []

    def once() -> None:
        if not kept:
            kept.append(device.empty((1, 4), np.float32))
        device.ops.add(x, x, kept[0])

    x = numbers(device, 0, 0, 0, 0)
    with device.compute():
        device.record(once)
        with pytest.raises(GpuError, match="taking memory while a stream is captured"):
            device.record(lambda: device.ops.add(x, x, device.empty((1, 4), np.float32)))


@pytest.mark.parametrize("fails_at_end", [False, True])
def test_a_recording_that_fails_says_why_and_leaves_the_device_in_use(
    device: Any, fails_at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is left capturing could not be used any more; and where its end fails as well, that is not why."""
    x, one = numbers(device, 0), numbers(device, 1)
    runs, end = iter([None, ValueError("refused")]), fake_cupy.Stream.end_capture

    def ops() -> None:
        if error := next(runs):
            raise error

    def ending(stream: Any) -> Any:
        end(stream)
        raise RuntimeError("the capture is not valid")

    if fails_at_end:
        monkeypatch.setattr(fake_cupy.Stream, "end_capture", ending)
    with device.compute():
        with pytest.raises(ValueError, match="refused"):
            device.record(ops)
        adding(device, x, one)()
        assert device.host(x).tolist() == [[1]]


def test_a_recording_keeps_its_arrays(device: Any) -> None:
    """A graph knows addresses alone: were the arrays freed, it would write to what others have by then."""
    x = numbers(device, 1)
    with device.compute():
        run = device.record(adding(device, x, numbers(device, 2)))
        gc.collect()
        run()
    assert device.host(x).tolist() == [[5]]


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_copies_come_in_order_among_ops(device: Any) -> None:
    """What is sent is there before the next op; what is fetched is what the ops so far have made, whatever comes then."""
    x, source = numbers(device, 0, 0), device.staging(8).view(np.float32).reshape(1, 2)
    with device.compute():
        adding(device, x, x)()
        source[:] = 1, 2
        device.send(x, source)
        adding(device, x, x)()
        read = device.fetch(x)
        adding(device, x, x)()
        source[:] = 0
        later = device.fetch(x)
    assert later().tolist() == [[0, 0]]  # nobody waited before the source was changed
    assert read().tolist() == [[0, 0]]


def test_what_was_sent_may_change_when_it_was_waited_for(device: Any) -> None:
    """Not before: the copy need not have begun."""
    x, source = numbers(device, 0, 0), device.staging(8).view(np.float32).reshape(1, 2)
    source[:] = 1, 2
    wait = device.send(x, source)
    wait()
    source[:] = 3
    assert device.host(x).tolist() == [[1, 2]]


def test_what_is_fetched_is_its_readers(device: Any) -> None:
    """Later copies go to other memory, and one that nobody reads to none that is another's by then."""
    x, one = numbers(device, 5, 6), numbers(device, 1, 1)
    with device.compute():
        read = device.fetch(x)
        for _ in range(3):
            adding(device, x, one)()
            device.fetch(x)
        gc.collect()
        last = device.fetch(x)
    assert last().tolist() == [[8, 9]] and read().tolist() == [[5, 6]] and read().dtype == np.float32
    assert device.fetch(x)().tolist() == [[8, 9]] and len(device._unread) <= 2


def test_the_host_waits_for_what_it_reads(device: Any) -> None:
    """On whichever stream that comes."""
    x, one = numbers(device, 5), numbers(device, 1)
    with device.compute():
        adding(device, x, one)()
    assert device.host(x).tolist() == [[6]]


def test_ops_run_on_the_devices_own_stream(device: Any, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the current one of the thread meanwhile, on the device's GPU; nothing waits for all that the device does."""
    calls: list[str] = []
    monkeypatch.setattr(fake_cupy.Device, "__enter__", lambda _: calls.append("entered"))
    monkeypatch.setattr(fake_cupy.Device, "__exit__", lambda _, *error: calls.append("left"))
    with device.compute():
        assert gpu.current == device._stream.ptr != 0 and calls == ["entered"]
    assert gpu.current == 0 and calls == ["entered", "left"]


def test_waiting_for_the_device_is_waiting_for_all(device: Any, gpu: Gpu) -> None:
    x = numbers(device, 1)
    with device.compute():
        adding(device, x, x)()
    assert np.isnan(x.here).all()
    device.synchronize()
    assert x.here.tolist() == [[2]]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_pool_on_the_host_is_pinned_as_long_as_it_is_used(device: Any, gpu: Gpu) -> None:
    """Kernels read and write it, and it takes as many bytes as it has; none are pinned for an empty one."""
    before = gpu.held_bytes
    pool, x = device.empty_host([1, 3], np.float32), numbers(device, 1, 2, 3)
    assert gpu.held_bytes - before == 2 * x.nbytes
    gc.collect()
    with device.compute():
        device.ops.add(pool, x, x)
        adding(device, x, pool)()
    assert device.host(x).tolist() == [[3, 6, 9]]
    del pool
    assert gpu.held_bytes - before == x.nbytes
    assert device.empty_host((2, 0, 3), np.float16).shape == (2, 0, 3)


def test_a_closed_device_keeps_no_memory(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CuPy's pool holds and nobody uses goes back to the GPU."""
    freed: list[str] = []
    monkeypatch.setattr(device.xp.get_default_memory_pool(), "free_all_blocks", lambda: freed.append("all"))
    device.close()
    assert freed == ["all"]


def test_numbers_of_the_gpu_do_not_reach_the_host_unseen(device: Any) -> None:
    """Each would wait for all that is on a stream."""
    x = numbers(device, 1, 2)
    for use in (np.asarray, bool, lambda x: x == 1, lambda x: x + np.ones(2, np.float32), lambda x: np.add(x, 1)):
        with pytest.raises(TypeError):
            use(x)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_with_gpus_talk_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI would take their arrays for host memory. A rank alone needs none of it."""
    made: list[Any] = []
    monkeypatch.setattr(cuda, "NcclCommunicator", lambda mpi: made.append(mpi) or "nccl")
    device, communicator = object.__new__(cuda.CudaDevice), object.__new__(cuda.MpiCommunicator)
    communicator.mpi = "world"
    device.join(communicator)
    assert device.communicator == "nccl" and made == ["world"]
    device.join(alone := Communicator())
    assert device.communicator is alone and made == ["world"]
