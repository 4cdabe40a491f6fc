"""How fast the machine reads memory: the roof of a decode step, which has to read all weights once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
PASSES = 3  #: a reading is the best of so many


@numba.njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]  # fastmath: sums in many lanes
def _sum(values: Floats) -> np.float32:
    total = np.float32(0)
    for value in values:
        total += value
    return total


class ReadRoof:
    """An array several times as large as any cache, which ``threads`` threads sum together, each a part of its own."""

    def __init__(self, threads: int, num_bytes: int = 512 << 20) -> None:
        self._parts = np.array_split(np.ones(num_bytes // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)
        _sum(self._parts[0][:1])  # compiles

    def measure(self) -> float:
        """Bytes a second, by NumPy's sum or a loop compiled by Numba, whichever is faster."""
        return max(self._measure(add) for add in (np.sum, _sum) for _ in range(PASSES))

    def _measure(self, add: Callable[[Floats], object]) -> float:
        start = time.perf_counter()
        list(self._pool.map(add, self._parts))
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - start)

    def close(self) -> None:
        """Give threads and memory back."""
        self._pool.shutdown()
        self._parts = []
