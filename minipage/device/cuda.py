"""CUDA: CuPy arrays on an NVIDIA GPU; and the same kernels in Numba's simulator, on NumPy arrays, for tests."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from ..kernels.ops import Array
from .base import Device
from .cpu import HostDevice

_SWITCH = "NUMBA_ENABLE_CUDASIM"
_USE_CPU = 'device="cpu" needs no GPU'


class CudaDevice(Device):
    """The current NVIDIA GPU. Ops run on CuPy's current stream."""

    name = "cuda"

    def __init__(self) -> None:
        """Raises InvalidArgumentError where a GPU cannot be used from here, saying what is missing."""
        _check_gpu()
        import cupy

        from ..kernels import cuda

        self.xp, self.ops = cupy, cuda
        self._device = cupy.cuda.Device()

    def host(self, array: Array) -> np.ndarray:
        return np.asarray(self.xp.asnumpy(array))

    def empty_host(self, shape: Sequence[int], dtype: Any) -> Array:
        """Pinned host memory as an array that kernels reach over the bus."""
        cuda = self.xp.cuda
        size = math.prod(shape) * np.dtype(dtype).itemsize
        pinned = cuda.alloc_pinned_memory(size)
        memory = cuda.UnownedMemory(pinned.ptr, size, pinned)
        return self.xp.ndarray(tuple(shape), dtype, cuda.MemoryPointer(memory, 0))

    def free_memory(self) -> int:
        """Bytes free on the GPU, those that CuPy's pool holds and does not use among them."""
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free + self.xp.get_default_memory_pool().free_bytes())

    def total_memory(self) -> int:
        _, total = self.xp.cuda.runtime.memGetInfo()
        return int(total)

    def compute(self) -> AbstractContextManager[Any]:
        """Makes this GPU the current one of the thread."""
        device: AbstractContextManager[Any] = self._device
        return device

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        """Give unused memory of CuPy's pool back to the GPU."""
        self.xp.get_default_memory_pool().free_all_blocks()


# The simulator runs one kernel at a time in a process.
_SIMULATOR_LOCK = threading.Lock()


class SimulatedCudaDevice(HostDevice):
    """The CUDA kernels in Numba's simulator: thousands of times slower than a GPU, on any machine."""

    name = "cuda-sim"

    def __init__(self) -> None:
        """Raises InvalidArgumentError where the simulator cannot be used or cannot be turned on any more."""
        _turn_simulator_on()
        from ..kernels import cuda

        self.ops = cuda

    def compute(self) -> AbstractContextManager[Any]:
        return _SIMULATOR_LOCK


def open_cuda(name: str) -> Device:
    """The device "cuda" or "cuda-sim"; InvalidArgumentError for any other name, or where it cannot be used."""
    if name == "cuda":
        return CudaDevice()
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


def _check_gpu() -> None:
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

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy raises its own classes, and ImportError for a CUDA library that is missing
        raise InvalidArgumentError(
            f'device="cuda": CuPy is installed but finds no usable NVIDIA driver or GPU ({error}); {_USE_CPU}'
        ) from error
    if count == 0:
        raise InvalidArgumentError(f'device="cuda": the NVIDIA driver shows no GPU; {_USE_CPU}')


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
