"""How Numba sees the storages: by a dtype of its own for each, since it refuses float16 arrays on the CPU.

    float32     float32
    bfloat16    uint16, its bits, as everywhere in this project
    float16     int16, its bits
    int8        int8, of pages; their scales are not seen here

So the dtype alone tells a compiled function which storage it reads, and each is compiled only when it is used.
"""

from __future__ import annotations

import numpy as np

from ..dtypes import to_float32
from ..ops import Array

#: A storage's dtype in Numba's signatures, by the NumPy dtype of the array.
NUMBA_STORAGE = {
    np.dtype(np.float32): "float32",
    np.dtype(np.uint16): "uint16",
    np.dtype(np.float16): "int16",
    np.dtype(np.int8): "int8",
}


def as_numba(array: Array) -> Array:
    """The array as Numba is to see it: itself, or float16 as int16."""
    return array.view(np.int16) if array.dtype == np.float16 else array


def widen(stored: Array) -> Array:
    """An array that Numba sees (see :func:`as_numba`) as float32."""
    if stored.dtype == np.int8:
        return stored.astype(np.float32)
    return to_float32(stored.view(np.float16) if stored.dtype == np.int16 else stored)
