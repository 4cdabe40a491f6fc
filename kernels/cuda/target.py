"""The one place that kernels take Numba's CUDA target from: decorators, launches, and whether the simulator stands in for a GPU.

The kernels are the same on a GPU (CuPy arrays) and in Numba's simulator (NumPy arrays, NUMBA_ENABLE_CUDASIM=1 before Numba's
CUDA target is first imported); what differs is decided here. Kernels write ``cuda.threadIdx`` and the like on the ``cuda``
of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda as cuda
from numba.core import config

from .launcher import launch_compiled, unfit

Array = Any

#: Whether kernels run in Numba's simulator, thread by thread in Python.
SIMULATED = bool(config.ENABLE_CUDASIM)
#: Numbers that are kept in 32 bits, while Numba computes with 64. Those of the simulator are Python's, which are faster.
int32: Any = int if SIMULATED else np.int32
uint32: Any = int if SIMULATED else np.uint32
WARP = 32
HALF_OF_WARPS = 32  #: that a multiprocessor can hold: as many as kernels which wait for memory want there
#: Threads of a block where a kernel has no reason to choose: every simulated thread costs, and one warp shows as much.
THREADS = WARP if SIMULATED else 256

if SIMULATED:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    from . import simulator

    simulator.install()


def kernel(function: Callable[..., None]) -> Any:
    """A function as a CUDA kernel, compiled for its argument types at its first launch (an eager signature needs a driver)."""
    return cuda.jit(function)


def bounded_kernel(threads: int, blocks: int) -> Callable[[Callable[..., None]], Any]:
    """A kernel whose blocks have at most ``threads``, and of which a multiprocessor shall hold ``blocks`` at least.

    The compiler keeps to the registers that this leaves a thread.
    """
    return kernel if SIMULATED else cuda.jit(launch_bounds=(threads, blocks))


def device_function(function: Callable[..., Any]) -> Any:
    """A function as one that kernels call."""
    return cuda.jit(device=True)(function)


def pure_function(function: Callable[..., Any]) -> Any:
    """A device function that uses nothing of ``cuda``: the simulator calls it as plain Python, which is ten times faster."""
    return function if SIMULATED else device_function(function)


@pure_function
def divide(a: Any, b: Any) -> Any:
    """a // b of numbers that are not negative, in 32 bits: a long division takes more of everything."""
    return int32(uint32(a) // uint32(b))


def launch(function: Any, grid: tuple[int, ...], threads: int, *args: Any) -> None:
    """Launch a kernel on the current CuPy stream; nothing to do is no launch (CUDA refuses an empty grid).

    Scalars must be Python ints or NumPy float32: a Python float would make the arithmetic float64.
    """
    if 0 in grid:
        return
    if SIMULATED:
        for arg in args:
            if not isinstance(arg, int | np.integer | np.float32 | np.ndarray):
                raise unfit(function, arg)
        # Arrays that are on the device already: others are copied there and back for each launch.
        on_device = (FakeCUDAArray(arg) if isinstance(arg, np.ndarray) else arg for arg in args)
        function[grid, threads](*on_device)
    else:
        launch_compiled(function, grid, threads, args)


def blocks_for(n: int, per_block: int) -> int:
    """Thread blocks that ``n`` elements need."""
    return -(-n // per_block)


def address(array: Array) -> int:
    """Where an array begins in memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def to_device(host: np.ndarray) -> Array:
    """A host array where the kernels can read it."""
    if SIMULATED:
        return host
    import cupy

    return cupy.asarray(host)


def to_host(array: Array) -> np.ndarray:
    """An array on the host, whichever side it was on."""
    return array if isinstance(array, np.ndarray) else array.get()


_scratch: dict[tuple[str, int, int], list[Array]] = {}


def scratch(name: str, num_floats: int) -> Array:
    """At least ``num_floats`` float32, of any values, for ops of the current stream that share ``name``.

    They are the same ones from call to call, and grow. Those that were outgrown are kept, for CUDA graphs may write to them; and
    an op is called once before it is recorded, since nothing may be allocated while a stream is captured.
    """
    if SIMULATED:
        return np.full(num_floats, np.nan, np.float32)
    import cupy

    key = name, cupy.cuda.get_device_id(), cupy.cuda.get_current_stream().ptr
    kept = _scratch.setdefault(key, [])
    if not kept or kept[-1].size < num_floats:
        kept.append(cupy.empty(1 << (num_floats - 1).bit_length(), np.float32))
    return kept[-1]


def is_capturing() -> bool:
    """Whether the current stream's launches are recorded as a CUDA graph."""
    if SIMULATED:
        return False
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())
