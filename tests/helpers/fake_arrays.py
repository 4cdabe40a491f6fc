"""Arrays of a :mod:`.fake_gpu` as CuPy's are, as far as minipage uses them.

What CuPy refuses is refused: NumPy arrays among those of the GPU, truth values and comparisons, copies between arrays that
differ in shape, dtype or order. So is what would be slow or surprising: indices on the host, and shapes that need a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from .fake_gpu import Block, Gpu, GpuError, Memory, Step


class Array:
    """An array on the GPU. Work that is put on a stream knows its bytes, and does not keep them."""

    __hash__ = None
    __array_ufunc__ = None  # NumPy's functions and arrays refuse it

    def __init__(self, gpu: Gpu, memory: Any, here: np.ndarray, block: Block) -> None:
        """``here`` is what it holds, and ``memory`` what has to be kept."""
        self._gpu, self._memory, self.here, self.block = gpu, memory, here, block
        self.shape, self.dtype, self.strides, self.ndim = here.shape, here.dtype, here.strides, here.ndim
        self.size, self.itemsize, self.nbytes, self.flags = here.size, here.itemsize, here.nbytes, here.flags

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=int(self.here.ctypes.data) if self.size else 0)

    def __len__(self) -> int:
        return len(self.here)

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    # ---- views -------------------------------------------------------------------------------------------------------
    def _view(self, here: np.ndarray) -> Array:
        if here.size and not np.may_share_memory(here, self.here):
            raise GpuError(f"an array of shape {self.shape} and strides {self.strides} would be copied")
        return Array(self._gpu, self._memory, here, self.block)

    def reshape(self, *shape: Any) -> Array:
        return self._view(self.here.reshape(*shape))

    def transpose(self, *axes: Any) -> Array:
        return self._view(self.here.transpose(*axes))

    def view(self, dtype: Any) -> Array:
        return self._view(self.here.view(dtype))

    # ---- work on the current stream ----------------------------------------------------------------------------------
    def _put(self, name: str, run: Callable[[], object], *arrays: Array) -> None:
        self._gpu.put(self._gpu.current, Step(name, run, [each.block for each in (self, *arrays)]))

    def __getitem__(self, index: Any) -> Array:
        plain, indices = _plain(index)
        if not indices:
            return self._view(self.here[plain])
        out = new_array(self._gpu, self._shape_at(plain), self.dtype)
        here, there = self.here, out.here
        self._put("gathering", lambda: np.copyto(there, here[plain]), out, *indices)
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        plain, indices = _plain(index)
        if isinstance(value, Array):
            indices.append(value)
        elif not isinstance(value, int | float | np.generic):
            raise TypeError(f"{type(value)} cannot be assigned to a part of an array on the GPU")
        here, there = getattr(value, "here", value), self.here
        place = self._shape_at(plain)
        if np.broadcast_shapes(np.shape(here), place) != place:
            raise ValueError(f"an array of shape {np.shape(here)} does not fit {place}")
        self._put("assigning", lambda: there.__setitem__(plain, here), *indices)

    def _shape_at(self, index: tuple[Any, ...]) -> tuple[int, ...]:
        any_values = np.broadcast_to(np.uint8(0), self.shape)
        return any_values[tuple(np.zeros_like(i) if isinstance(i, np.ndarray) else i for i in index)].shape

    def copy(self) -> Array:
        out = new_array(self._gpu, self.shape, self.dtype)
        out[...] = self
        return out

    # ---- copies from and to the host ---------------------------------------------------------------------------------
    def set(self, array: np.ndarray, stream: Any = None) -> None:
        self._gpu.refuse_in_capture("copying from the host")
        _check_copy(self, array)
        source, pinned = _pinned(self._gpu, array)
        if not pinned:  # the driver takes it before it returns
            source = array.copy()
        there = self.here
        step = Step("copying from the host", lambda: np.copyto(there, source), [self.block, *pinned])
        self._gpu.put(self._gpu.current if stream is None else stream.ptr, step)

    def get(self, stream: Any = None, *, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        self._gpu.refuse_in_capture("copying to the host")
        host = np.empty(self.shape, self.dtype) if out is None else out
        if out is not None:
            _check_copy(self, out)
        there, pinned = _pinned(self._gpu, host)
        here, on = self.here, self._gpu.current if stream is None else stream.ptr
        self._gpu.put(on, Step("copying to the host", lambda: np.copyto(there, here), [self.block, *pinned]))
        if blocking or not pinned:  # the driver waits for what is not pinned
            self._gpu.wait_for(on)
        return host

    # ---- what would wait unseen --------------------------------------------------------------------------------------
    def _refuse(self, *_: Any) -> Any:
        raise TypeError("an array on the GPU is not to be converted implicitly")

    __array__ = __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _plain(index: Any) -> tuple[tuple[Any, ...], list[Array]]:
    """An index as one of NumPy's, and the arrays on the GPU in it."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if not (part is None or part is ... or isinstance(part, int | np.integer | slice | Array)):
            raise TypeError(f"{type(part)} is not allowed as an index of an array on the GPU")
    arrays = [part for part in parts if isinstance(part, Array)]
    plain = tuple(part.here if isinstance(part, Array) else part for part in parts)
    is_whole = arrays or any(part is ... for part in parts)
    return plain if is_whole else (*plain, ...), arrays  # an element is an array too


def _check_copy(array: Array, host: Any) -> None:
    """Whether host and GPU can be copied as they are, without a copy in between that nobody keeps."""
    if type(host) is not np.ndarray or host.dtype != array.dtype:
        raise TypeError(f"{getattr(host, 'dtype', type(host))} and {array.dtype} on the GPU cannot be copied")
    if host.shape != array.shape:
        raise ValueError(f"shapes {host.shape} and {array.shape} on the GPU cannot be copied")
    if not (host.flags.c_contiguous and array.flags.c_contiguous):
        raise GpuError(f"strides {host.strides} and {array.strides} on the GPU cannot be copied in one piece")


def _pinned(gpu: Gpu, host: np.ndarray) -> tuple[np.ndarray, list[Block]]:
    """A host array by its address, and its block; or itself and none, where its memory is not pinned."""
    if gpu.find(int(host.ctypes.data), host.nbytes) is None:
        return host, []
    here, block = gpu.view(int(host.ctypes.data), host.shape, host.dtype, host.strides)
    return here, [block]


def new_array(gpu: Gpu, shape: Any, dtype: Any) -> Array:
    """An array of the current stream's memory, in C order."""
    shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {dtype} is not allowed on a GPU")
    memory = Memory(gpu, prod(shape) * dtype.itemsize, gpu.current)
    return Array(gpu, memory, np.ndarray(shape, dtype, memory.block.bytes), memory.block)
