"""Huge pages of host memory, and where they are too large.

Linux can back memory with pages of 2 MB in place of 4 KB. A decode step reads all weights once and finds no page's address in
the processor's buffer: with huge pages it takes a quarter less time. NumPy asks for them where an array has 4 MB and more,
which most weights of small models have not, so these share large pieces of memory.

Attention reads huge pages a tenth faster. But they are zeroed whole when a byte of them is touched, and every layer of K and V
has its own: the first token of a model with 30 layers would take 120 MB and more, which costs more time than to compute it. So
pages of K and V are small ones until they fill up.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

HUGE_PAGE = 2 << 20  #: bytes
_COLLAPSE = 25  #: MADV_COLLAPSE (Linux 6.1), for which mmap has no name: make pages huge that are there already
_CHUNK = 32 * HUGE_PAGE  #: bytes of memory that arrays share; what is never touched of it takes none
_ALIGNMENT = 64  #: bytes, a cache line, at whose multiples arrays begin


class HugeArrays:
    """Makes arrays of zeros as NumPy does, but side by side in huge pages. The last of them frees what they share."""

    def __init__(self) -> None:
        self._rest = np.zeros(0, np.uint8)

    def zeros(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An array of zeros that begins at a cache line."""
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        room = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if room > len(self._rest):
            self._rest = _zeros_in_huge_pages(max(room, _CHUNK))
        array: np.ndarray = self._rest[:num_bytes].view(dtype).reshape(shape)
        self._rest = self._rest[room:]
        return array


def _zeros_in_huge_pages(num_bytes: int) -> np.ndarray:
    """Bytes that have not been touched, from the beginning of a huge page on."""
    room = np.zeros(num_bytes + HUGE_PAGE, np.uint8)
    skip = -room.ctypes.data % HUGE_PAGE
    chunk = room[skip : skip + num_bytes]
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(chunk, mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return chunk


def use_small_pages(array: np.ndarray) -> None:
    """Back an array that has not been touched yet with small pages. Only Linux can be told."""
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        _advise(array, mmap.PAGESIZE, mmap.MADV_NOHUGEPAGE)


def use_huge_pages(array: np.ndarray, touched: int) -> None:
    """Back an array with huge pages from now on, and at once where it has been touched: ``touched`` bytes of each ``array[i]``.

    Where Linux is older it does that later, or never; what is in the array stays as it is.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    _advise(array, mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    for part in array:
        begin = part.ctypes.data // HUGE_PAGE * HUGE_PAGE
        _advise(array, HUGE_PAGE, _COLLAPSE, begin, part.ctypes.data + touched)


def _advise(array: np.ndarray, page: int, advice: int, begin: int = 0, end: int = 1 << 63) -> None:
    """Tell Linux about the whole pages of an array that overlap with the addresses from ``begin`` to ``end``."""
    start, stop = array.ctypes.data, array.ctypes.data + array.nbytes
    first = max(-(-start // page), begin // page) * page
    last = min(stop // page, -(-end // page)) * page
    if first < last:
        _madvise()(first, last - first, advice)  # it is advice: that it is not taken is no error


def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
