"""CuPy arrays as a launch takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba.cuda import types
from numba.cuda.args import ArgHint
from numba.cuda.np.numpy_support import from_dtype


class GpuArray(ArgHint):  # type: ignore[misc]
    """A CuPy array with what Numba would find out about it at each launch.

    That takes several times as long as the launch itself: Numba builds the array's type anew, asks the driver about its pointer,
    and waits on the host for the stream that the array names, which is the one that is launched on.
    """

    def __init__(self, array: Any) -> None:
        self._numba_type_ = _type_of(array.dtype, array.ndim, array.flags.c_contiguous)
        # What Numba reads of an array that is on the device (_Kernel._prepare_args of numba-cuda 0.30).
        self.size, self.dtype, self.shape, self.ptr = array.size, array.dtype, array.shape, array.data.ptr
        self.strides_in_bytes = array.strides
        self._layout = self

    def to_device(self, retr: list[Any], stream: Any = 0) -> GpuArray:
        """It is there."""
        return self


@lru_cache(256)
def _type_of(dtype: Any, ndim: int, is_contiguous: bool) -> Any:
    return types.Array(from_dtype(dtype), ndim, "C" if is_contiguous else "A")
