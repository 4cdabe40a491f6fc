"""CuPy, as far as minipage uses it, on a :mod:`.fake_gpu`; with the kernels in Numba's simulator ``device="cuda"`` runs on it."""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .fake_arrays import Array, new_array
from .fake_gpu import Block, Gpu, Graph, Memory, Step, Work, check_launch

FREE, TOTAL = 3 << 28, 1 << 30  #: bytes of the GPU's memory


# ---- the module ------------------------------------------------------------------------------------------------------
class _Arrays:
    """Functions of the module ``cupy``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def empty(self, shape: Any, dtype: Any = float) -> Array:
        return new_array(self._gpu, shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float) -> Array:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def asarray(self, host: Any) -> Array:
        if isinstance(host, Array):
            return host
        array = self.empty(host.shape, host.dtype)
        array.set(np.array(host, order="C"))
        return array

    def asnumpy(self, array: Array) -> np.ndarray:
        return array.get()

    def maximum(self, x: Array, least: int, *, out: Array) -> None:
        assert isinstance(x, Array) and isinstance(out, Array) and type(least) is int and out.dtype == x.dtype
        here, there = x.here, out.here
        x._put("maximum", lambda: np.maximum(here, least, out=there), out)

    def ndarray(self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer) -> Array:
        strides = np.broadcast_to(np.zeros((), dtype), shape).copy().strides
        return Array(self._gpu, memptr, *self._gpu.view(memptr.ptr, shape, dtype, strides))


class MemoryPointer:
    """A place in memory, which is kept."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class UnownedMemory:
    """Memory of an owner, who is kept."""

    def __init__(self, ptr: int, size: int, owner: Any) -> None:
        if ptr == 0:
            raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
        self.ptr, self.size, self.owner = ptr, size, owner


def _pinned_buffer(gpu: Gpu, size: int) -> Any:
    """Pinned bytes as a buffer, which keeps them, as NumPy arrays made from it do (of an array they would keep the root only)."""
    memory = Memory(gpu, max(1 << (size - 1).bit_length(), 512))  # as CuPy's pool does
    buffer = (ctypes.c_uint8 * memory.size).from_buffer(memory.block.bytes)
    buffer.memory, buffer.ptr = memory, memory.ptr
    return buffer


class Stream:
    """A stream of its own."""

    def __init__(self, gpu: Gpu, non_blocking: bool = False) -> None:
        self._gpu, self.ptr = gpu, gpu.new_stream(not non_blocking)
        weakref.finalize(self, gpu.end_stream, self.ptr).atexit = False

    def __enter__(self) -> Stream:
        self._gpu.enter(self.ptr)
        return self

    def __exit__(self, *error: Any) -> None:
        self._gpu.leave()

    def synchronize(self) -> None:
        self._gpu.wait_for(self.ptr)

    def begin_capture(self) -> None:
        self._gpu.begin_capture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(self._gpu, self._gpu.end_capture(self.ptr))


class Event:
    """When all has happened that was on a stream."""

    def __init__(self, gpu: Gpu, disable_timing: bool = False) -> None:
        self._gpu = gpu
        self._work: Work | None = None

    def record(self, stream: Any = None) -> None:
        self._gpu.refuse_in_capture("recording an event")
        self._work = self._gpu.put(self._gpu.current if stream is None else stream.ptr, Step("an event", lambda: None))

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_done

    def synchronize(self) -> None:
        self._gpu.refuse_in_capture("waiting for an event")
        self._gpu.finish(self._work)


class Device:
    """The only GPU."""

    id, compute_capability = 0, "90"

    def __init__(self, gpu: Gpu, number: int | None = None) -> None:
        assert number in (None, 0)
        self._gpu = gpu

    def use(self) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def synchronize(self) -> None:
        self._gpu.wait_for_all()


def modules(gpu: Gpu, driver: Driver) -> dict[str, Any]:
    """``cupy`` and its parts, by the names that they are imported by."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13000,
        memGetInfo=lambda: (FREE, TOTAL),
    )
    pool = SimpleNamespace(
        free_bytes=lambda: 0, used_bytes=lambda: 0, free_all_blocks=lambda: gpu.refuse_in_capture("giving memory back")
    )
    arrays = _Arrays(gpu)
    cupy = ModuleType("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    for name in ("empty", "zeros", "asarray", "asnumpy", "maximum", "ndarray"):
        setattr(cupy, name, getattr(arrays, name))
    cupy.get_default_memory_pool = lambda: pool
    cupy.cuda = SimpleNamespace(
        Stream=partial(Stream, gpu),
        Event=partial(Event, gpu),
        Device=partial(Device, gpu),
        PinnedMemory=partial(Memory, gpu),
        alloc_pinned_memory=partial(_pinned_buffer, gpu),
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        get_device_id=lambda: 0,
        get_current_stream=lambda: SimpleNamespace(
            ptr=gpu.current, is_capturing=lambda: gpu.lines[gpu.current].captured is not None
        ),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        runtime=runtime,
    )
    backends = {name: ModuleType(name) for name in ("cupy_backends", "cupy_backends.cuda")}
    return {"cupy": cupy, "cupy.cuda": cupy.cuda, **backends, "cupy_backends.cuda.api": SimpleNamespace(driver=driver)}


# ---- kernels ---------------------------------------------------------------------------------------------------------
class Driver:
    """CuPy's driver as far as kernels are loaded and launched; their machine code is the place that they have here."""

    def __init__(self, gpu: Gpu, run_now: Callable[..., None]) -> None:
        """``run_now`` runs a kernel for a grid, threads and NumPy arrays."""
        self._gpu, self._run_now = gpu, run_now
        self._kernels: list[tuple[Any, Any]] = []  #: each with the kinds of its arguments, as the launcher has them

    def compile(self, function: Any, kinds: Any) -> bytes:
        """In the place of Numba: name and machine code."""
        self._gpu.refuse_in_capture("compiling a kernel")
        self._kernels.append((function, kinds))
        return b"entry\0%d" % (len(self._kernels) - 1)

    def moduleLoadData(self, image: bytes) -> int:
        self._gpu.refuse_in_capture("loading a kernel")
        return int(image)

    def moduleGetFunction(self, module: int, name: str) -> int:
        assert name == "entry"
        return module

    def launchKernel(self, kernel: int, *numbers: int) -> None:
        *shape, shared, stream, addresses, extra = numbers
        assert (shared, extra) == (0, 0)
        grid, threads = tuple(shape[:3]), tuple(shape[3:])
        check_launch(grid, threads)
        function, kinds = self._kernels[kernel]
        values, blocks = self._arguments(kinds, addresses)
        name = function.py_func.__name__
        self._gpu.put(stream, Step(name, lambda: self._run_now(function, grid, threads, values), blocks))

    def _arguments(self, kinds: Any, addresses: int) -> tuple[list[Any], list[Block]]:
        """What the parameters are of which a list has the addresses, and the memory of the arrays among them."""
        values: list[Any] = []
        blocks: list[Block] = []
        place = itertools.count()

        def parameter(kind: Any = ctypes.c_int64) -> Any:
            where = ctypes.c_uint64.from_address(addresses + 8 * next(place)).value
            return kind.from_address(where).value

        for kind in kinds:
            if isinstance(kind, str):
                values.append(parameter() if kind == "q" else np.float32(parameter(ctypes.c_float)))
                continue
            dtype, ndim, is_contiguous = kind
            _, _, size, itemsize, pointer = (parameter() for _ in range(5))
            shape, strides = (tuple(parameter() for _ in range(ndim)) for _ in range(2))
            here, block = self._gpu.view(pointer, shape, np.dtype(dtype), strides)
            assert (here.size, here.itemsize, here.flags.c_contiguous) == (size, itemsize, is_contiguous)
            values.append(here)
            blocks.append(block)
        return values, blocks


def install(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Let ``device="cuda"`` be a fake GPU from now on, until ``monkeypatch`` is undone."""
    from minipage.device import cuda, open_device

    open_device("cuda-sim")  # turns the simulator on, or says why it cannot be
    from minipage.kernels.cuda import launcher, target

    def run_now(function: Any, grid: tuple[int, ...], threads: tuple[int, ...], values: list[Any]) -> None:
        function[grid, threads](*(target.FakeCUDAArray(v) if isinstance(v, np.ndarray) else v for v in values))

    gpu = Gpu()
    driver = Driver(gpu, run_now)
    for name, module in modules(gpu, driver).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda, "_simulator_is_on", lambda: False)
    # What was decided when the simulator was turned on, and what is kept from launch to launch.
    jit = target.cuda.jit
    monkeypatch.setattr(target.cuda, "jit", lambda *given, launch_bounds=None, **options: jit(*given, **options))
    monkeypatch.setattr(target, "SIMULATED", False)
    monkeypatch.setattr(target, "launch_compiled", launcher.launch_compiled, raising=False)
    monkeypatch.setattr(target, "_scratch", {})
    # Kernels are neither compiled nor kept in files.
    monkeypatch.setattr(launcher, "_loaded", {})
    monkeypatch.setattr(launcher, "_compile", driver.compile)
    monkeypatch.setattr(launcher, "identity", lambda function, kinds: ())
    monkeypatch.setattr(launcher, "_folder", SimpleNamespace(code=lambda compiled: compiled()))
    return gpu
