"""CUDA: CuPy arrays on an NVIDIA GPU; and the same kernels in Numba's simulator, on NumPy arrays, for tests."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError, OutOfMemoryError, mebibytes
from ..kernels.ops import Array
from .base import Device, StepShape
from .communicator import Communicator, MpiCommunicator, NcclCommunicator
from .cpu import HostDevice

_SWITCH = "NUMBA_ENABLE_CUDASIM"
_USE_CPU = 'device="cpu" needs no GPU'
LEAST_CAPABILITY = (8, 0)  #: of a GPU: the kernels multiply 16-bit floats by instructions that came with it

#: Rows that decode steps are recorded for: a step has the next larger number, so that few recordings serve all.
RECORDED_ROWS = (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32))


class PaddedDevice(Device):
    """Records decode steps, a token a sequence, for a few sizes only; other steps run without recording."""

    runs_ahead = True

    def recorded_rows(self, num_rows: int, most: int) -> int | None:
        """The next of RECORDED_ROWS, or ``most`` if that is less."""
        limit = min(most, RECORDED_ROWS[-1])
        return min((rows for rows in (*RECORDED_ROWS, limit) if num_rows <= rows <= limit), default=None)

    def recorded_shape(self, shape: StepShape, most: StepShape) -> StepShape | None:
        """Rows as above; tables as wide as the next power of two."""
        rows = self.recorded_rows(shape.num_tokens, min(most.num_tokens, most.num_seqs))
        if shape.num_tokens != shape.num_seqs or rows is None:
            return None
        return StepShape(rows, rows, min(1 << (shape.num_blocks - 1).bit_length(), most.num_blocks))


class CudaDevice(PaddedDevice):
    """An NVIDIA GPU. Ops run on a stream of the device's own; what is recorded is a CUDA graph."""

    name = "cuda"
    has_own_memory = True

    def __init__(self, gpu: int | None = None) -> None:
        """The GPU of that number; None is the current one. Raises InvalidArgumentError where it cannot be used from here,
        saying what is missing.
        """
        _check_gpu(gpu)
        import cupy

        from ..kernels import cuda

        self.xp, self.ops = cupy, cuda
        self._device = cupy.cuda.Device(gpu)
        self.begin_thread()
        # What is on CUDA's default stream, loading for instance, and what is on this one wait for each other.
        self._stream = cupy.cuda.Stream()
        self._unread: list[tuple[Any, np.ndarray]] = []  # what is fetched, each with the event that it has arrived
        # This one waits for no other: else nobody could use the default stream while it is captured, to load a second model.
        self._recording = cupy.cuda.Stream(non_blocking=True)

    def host(self, array: Array) -> np.ndarray:
        return np.asarray(self.xp.asnumpy(array))

    def empty_host(self, shape: Sequence[int], dtype: Any) -> Array:
        """Pinned host memory as an array that kernels reach over the bus."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size == 0:
            return self.empty(shape, dtype)  # CuPy cannot tell the device of memory that is nowhere
        cuda = self.xp.cuda
        pinned = cuda.PinnedMemory(size)  # not from CuPy's pool, which takes the next power of two
        memory = cuda.UnownedMemory(pinned.ptr, size, pinned)
        return self.xp.ndarray(tuple(shape), dtype, cuda.MemoryPointer(memory, 0))

    def staging(self, num_bytes: int) -> np.ndarray:
        """Pinned host memory as a NumPy array."""
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)

    def send(self, to: Array, source: np.ndarray) -> Callable[[], None]:
        to.set(source, stream=self._stream)
        return self._event().synchronize  # type: ignore[no-any-return]

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        host: np.ndarray = self.staging(array.nbytes).view(array.dtype).reshape(array.shape)
        array.get(stream=self._stream, out=host, blocking=False)
        event = self._event()
        # Memory that nobody reads any more goes to another copy, which this one must not write into.
        self._unread = [(event, host), *(each for each in self._unread if not each[0].done)]

        def wait() -> np.ndarray:
            event.synchronize()
            return host

        return wait

    def _event(self) -> Any:
        """What happens when all that is on the stream so far has."""
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """CuPy's error as one that says what is there and what to change."""
        memory = self.xp.cuda.memory.OutOfMemoryError
        try:
            yield
        except memory as error:
            held = self.xp.get_default_memory_pool().used_bytes()
            raise OutOfMemoryError(
                f"the GPU has no room for the model ({error}): {mebibytes(self.free_memory())} of "
                f"{mebibytes(self._total_memory())} are free, this process holds {mebibytes(held)}; allowed: less to hold, by "
                'quantization="int8" or "int4", a smaller max_num_batched_tokens, num_blocks or kv_cache_memory; another device'
            ) from error

    def free_memory(self) -> int:
        """Bytes free on the GPU, those that CuPy's pool holds and does not use among them."""
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free + self.xp.get_default_memory_pool().free_bytes())

    def _total_memory(self) -> int:
        """Bytes that the GPU has in all."""
        _, total = self.xp.cuda.runtime.memGetInfo()
        return int(total)

    def memory_for_cache(self, utilization: float | None) -> int:
        """What ``utilization`` of the GPU's memory (default: nine tenths) leaves beside all that is in use, by whomever."""
        used = self._total_memory() - self.free_memory()
        return max(int(self._total_memory() * (utilization or 0.9)) - used, 0)

    def begin_thread(self) -> None:
        """Make this GPU the current one of the thread, as CuPy has one for each."""
        self._device.use()

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Makes this GPU and this device's stream the current ones of the thread."""
        with self._device, self._stream:
            yield

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """The ops as a CUDA graph. They run once first: what is compiled or allocated at a first call cannot be recorded."""
        self._event().synchronize()
        with self._recording as stream:
            function()
            stream.synchronize()
            stream.begin_capture()
            try:
                function()
            except BaseException:
                with suppress(Exception):  # that the capture has failed is known, and why comes next
                    stream.end_capture()
                raise
            return partial(_launch, stream.end_capture(), function)

    def join(self, communicator: Communicator) -> None:
        """Arrays go to the other ranks by NCCL."""
        if isinstance(communicator, MpiCommunicator):
            communicator = NcclCommunicator(communicator.mpi)
        super().join(communicator)

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        """Give unused memory of CuPy's pool back to the GPU."""
        self.xp.get_default_memory_pool().free_all_blocks()


def _launch(graph: Any, function: Callable[[], None]) -> None:
    """Launch a graph on the current stream; ``function`` keeps the arrays alive that it reads and writes."""
    graph.launch()


# The simulator runs one kernel at a time in a process.
_SIMULATOR_LOCK = threading.Lock()


class SimulatedCudaDevice(PaddedDevice, HostDevice):
    """The CUDA kernels in Numba's simulator: thousands of times slower than a GPU, on any machine."""

    name = "cuda-sim"

    def __init__(self) -> None:
        """Raises InvalidArgumentError where the simulator cannot be used or cannot be turned on any more."""
        _turn_simulator_on()
        from ..kernels import cuda

        self.ops = cuda

    def compute(self) -> AbstractContextManager[Any]:
        return _SIMULATOR_LOCK


def open_cuda(name: str, gpu: int | None = None) -> Device:
    """The device "cuda" or "cuda-sim"; InvalidArgumentError for any other name, or where it cannot be used."""
    if name == "cuda":
        return CudaDevice(gpu)
    if name == "cuda-sim":
        return SimulatedCudaDevice()
    raise InvalidArgumentError(f"device={name!r} is not allowed; allowed: auto, cpu, cuda, cuda-sim, reference")


def cuda_is_available() -> bool:
    """Whether device="cuda" can be used here."""
    try:
        _check_gpu()
    except InvalidArgumentError:
        return False
    return True


def _check_gpu(gpu: int | None = None) -> None:
    if _simulator_is_on():
        raise InvalidArgumentError(
            f'device="cuda" cannot be used while Numba simulates CUDA ({_SWITCH}=1); '
            f'unset {_SWITCH} before Python starts, or use device="cuda-sim"'
        )
    for package, title in (("cupy", "CuPy"), ("numba_cuda", "numba-cuda")):
        if importlib.util.find_spec(package) is None:
            raise InvalidArgumentError(
                f'device="cuda" needs {title}, which is not installed; allowed: minipage[cuda12] or minipage[cuda13], '
                f"as the driver's CUDA version is; {_USE_CPU}"
            )
    try:
        import cupy

        _check_versions(cupy.cuda.runtime)
        count = cupy.cuda.runtime.getDeviceCount()
        capability = _capability(cupy) if count else LEAST_CAPABILITY
    except InvalidArgumentError:
        raise
    except Exception as error:  # CuPy raises its own classes, and ImportError for a CUDA library that is missing
        raise InvalidArgumentError(
            f'device="cuda": CuPy is installed but finds no usable NVIDIA driver or GPU ({error}); {_USE_CPU}'
        ) from error
    if count == 0:
        raise InvalidArgumentError(f'device="cuda": the NVIDIA driver shows no GPU; {_USE_CPU}')
    if gpu is not None and gpu >= count:
        raise InvalidArgumentError(
            f'device="cuda": each rank needs a GPU of its own, and this machine has {count}; allowed: as many ranks on it'
        )
    if capability < LEAST_CAPABILITY:
        raise InvalidArgumentError(
            f'device="cuda": this GPU has compute capability {_version(capability)}; '
            f"allowed: {_version(LEAST_CAPABILITY)} (Ampere) and later; {_USE_CPU}"
        )


def _check_versions(runtime: Any) -> None:
    """Raises InvalidArgumentError where CuPy is for a later major version of CUDA than the driver."""
    built, driver = runtime.runtimeGetVersion() // 1000, runtime.driverGetVersion() // 1000
    if 0 < driver < built:
        raise InvalidArgumentError(
            f'device="cuda": CuPy is installed for CUDA {built}, and the driver is for CUDA {driver}; '
            f"allowed: minipage[cuda{driver}] in its place, or a newer driver; {_USE_CPU}"
        )


def _capability(cupy: Any) -> tuple[int, int]:
    """The compute capability of the current GPU, which CuPy gives as two to three digits."""
    major, minor = divmod(int(cupy.cuda.Device().compute_capability), 10)
    return major, minor


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _turn_simulator_on() -> None:
    for package in ("numba_cuda", "greenlet"):
        if importlib.util.find_spec(package) is None:
            raise InvalidArgumentError(
                f'device="cuda-sim" needs {package.replace("_", "-")}, which is not installed; allowed: minipage[sim]; {_USE_CPU}'
            )
    if _simulator_is_on():
        return
    if "numba.cuda" in sys.modules:
        raise InvalidArgumentError(
            'device="cuda-sim" is not possible any more: numba.cuda was imported in this process without its simulator; '
            f"set {_SWITCH}=1 in the environment before Python starts"
        )
    os.environ[_SWITCH] = "1"
    if "numba" in sys.modules:
        # Numba has read its environment already; its CUDA target, not imported yet, looks here.
        sys.modules["numba.core.config"].ENABLE_CUDASIM = 1  # type: ignore[attr-defined]


def _simulator_is_on() -> bool:
    """Whether Numba's CUDA target is, or will be when it is imported, the simulator."""
    if "numba" in sys.modules:
        from numba.core import config

        return bool(config.ENABLE_CUDASIM)
    return os.environ.get(_SWITCH, "0") not in ("", "0")
