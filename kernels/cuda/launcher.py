"""Launches on a GPU: of machine code that Numba compiled once on this machine, through CuPy's driver.

Numba itself compiles in every process, and at each launch it builds the types of arrays anew and asks the driver about their
addresses, which takes many times as long as the launch. What a kernel's parameters are is Numba's choice: a number is one; an
array is two that are of no use here (who owns its memory), its size, the bytes of an element, its address, shape and strides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from types import FunctionType
from typing import Any

import numpy as np

from ..code_folder import CodeFolder

Array = Any

INTEGER, SINGLE = "q", "f"  #: kinds of numbers
ArrayKind = tuple[str, int, bool]  #: of an array: the character of its dtype, dimensions, whether it is contiguous
Kinds = tuple[str | ArrayKind, ...]
MAX_GRID_DIM = 3


def launch_compiled(function: Any, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
    """Launch a kernel on CuPy's current stream. It is compiled for its arguments' kinds at its first launch on this machine."""
    import cupy

    kinds: list[str | ArrayKind] = []
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, int | np.integer):
            kinds.append(INTEGER)
            values.append(arg)
        elif isinstance(arg, np.float32):
            kinds.append(SINGLE)
            values.append(arg)
        else:
            try:
                kinds.append((arg.dtype.char, arg.ndim, arg.flags.c_contiguous))
                values += 0, 0, arg.size, arg.itemsize, arg.data.ptr, *arg.shape, *arg.strides
            except AttributeError:
                raise unfit(function, arg) from None
    key = function, cupy.cuda.get_device_id(), tuple(kinds)
    loaded = _loaded.get(key)
    if loaded is None:
        loaded = _loaded[key] = Loaded(function, tuple(kinds))
    loaded.launch(grid, threads, values, cupy.cuda.get_current_stream().ptr)


class Loaded:
    """A kernel for one kind of arguments, in the memory of the current GPU."""

    def __init__(self, function: Any, kinds: Kinds) -> None:
        from cupy_backends.cuda.api import driver

        self._launch = driver.launchKernel
        entry, image = _folder.code(*identity(function, kinds), lambda: _compile(function, kinds)).split(b"\0", 1)
        self._kernel = driver.moduleGetFunction(driver.moduleLoadData(image), entry.decode())  # and never unloaded
        parameters = layout(kinds)
        self._pack_into: Callable[..., None] = Struct("=" + parameters.replace(SINGLE, SINGLE + "4x")).pack_into
        # A launch reads each parameter where an address in a list says: all of them are 8 bytes apart.
        self._values = np.zeros(len(parameters), np.int64)
        self._addresses = self._values.ctypes.data + 8 * np.arange(len(parameters))
        self._address = self._addresses.ctypes.data
        self._lock = threading.Lock()

    def launch(self, grid: tuple[int, ...], threads: int, values: list[Any], stream: int) -> None:
        """Launch it with the values of parameters."""
        x, y, z = (*grid, *[1] * (MAX_GRID_DIM - len(grid)))
        with self._lock:  # until the driver has read them
            self._pack_into(self._values, 0, *values)
            self._launch(self._kernel, x, y, z, threads, 1, 1, 0, stream, self._address, 0)


_loaded: dict[tuple[Any, int, Kinds], Loaded] = {}


def unfit(function: Any, arg: Any) -> TypeError:
    """The error for an argument that no launch takes."""
    name, kind = function.py_func.__name__, type(arg).__name__
    return TypeError(f"{name} was given {arg!r}, a {kind}; allowed: arrays on the device, integers and NumPy float32")


def layout(kinds: Kinds) -> str:
    """The kinds of a kernel's parameters, one after the other."""
    return "".join(kind if isinstance(kind, str) else INTEGER * (5 + 2 * kind[1]) for kind in kinds)


def identity(function: Any, kinds: Kinds) -> tuple[str, str]:
    """A name, and what tells a kernel for these arguments and the current GPU from all others of the same sources."""
    from cupy.cuda import Device

    bounds = function.targetoptions.get("launch_bounds")
    return function.py_func.__name__, f"{fingerprint(function)} {kinds} {bounds} {Device().compute_capability}"


def fingerprint(value: Any) -> str:
    """What a function is, as text that is the same in every process: where it is from, and what it closes over.

    TypeError where that is something of which it cannot be told.
    """
    value = getattr(value, "py_func", getattr(value, "_defn", value))  # of a dispatcher, and of an intrinsic
    if isinstance(value, FunctionType):
        closure = ", ".join(fingerprint(cell.cell_contents) for cell in value.__closure__ or ())
        return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}({closure})"
    if isinstance(value, tuple):
        return f"({', '.join(map(fingerprint, value))})"
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(f"a kernel closes over {text}, which has another name in each process")
    return text


def _compile(function: Any, kinds: Kinds) -> bytes:
    """A kernel's name and its machine code for the current GPU."""
    kernel = function.compile(tuple(map(_numba_type, kinds)))
    return b"\0".join([kernel.entry_name.encode(), kernel.library.get_cubin().code])


def _numba_type(kind: str | ArrayKind) -> Any:
    from numba.cuda import types
    from numba.cuda.np.numpy_support import from_dtype

    if isinstance(kind, str):
        return {INTEGER: types.int64, SINGLE: types.float32}[kind]
    dtype, ndim, is_contiguous = kind
    return types.Array(from_dtype(np.dtype(dtype)), ndim, "C" if is_contiguous else "A")


def _versions() -> tuple[object, ...]:
    import numba
    import numba_cuda
    from cupy.cuda import runtime

    return numba.__version__, numba_cuda.__version__, runtime.driverGetVersion()


_folder = CodeFolder(Path(__file__).parent, _versions, ".cubin")
