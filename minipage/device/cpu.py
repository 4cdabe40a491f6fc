"""The CPU: NumPy arrays, Numba kernels on a team of threads; and the reference device, plain NumPy, for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..config import MOST_THREADS
from ..errors import InvalidArgumentError
from ..kernels.ops import Array, Ops
from .base import Device
from .huge_pages import HugeArrays, use_huge_pages, use_small_pages


class HostDevice(Device):
    """What all devices in host memory share."""

    xp = np

    def host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def empty_pages(self, shape: Sequence[int], dtype: Any) -> Array:
        pages = self.empty(shape, dtype)
        use_small_pages(pages)
        return pages

    def fill_pages(self, pages: Array, num_blocks: int) -> None:
        use_huge_pages(pages, num_blocks * pages.strides[1])

    def free_memory(self) -> int:
        return self.free_host_memory()


class CpuDevice(HostDevice):
    """Numba kernels on a team of ``num_threads`` threads (default: the physical cores that this process may use)."""

    name = "cpu"

    def __init__(self, num_threads: int | None = None) -> None:
        from ..kernels import cpu
        from ..kernels.cpu.team import Team

        if num_threads is not None and num_threads > MOST_THREADS:
            raise InvalidArgumentError(f"num_threads={num_threads} is not allowed; allowed: 1 to {MOST_THREADS}")
        self.num_threads = num_threads or physical_cores()
        self.ops = cast(Ops, cpu)
        self._team = Team(self.num_threads)

    def weight_memory(self) -> HugeArrays:
        return HugeArrays()

    def compute(self) -> AbstractContextManager[Any]:
        return self._team

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with self._team.record() as recording:
            function()
        return partial(self._team.run, recording)

    def _call(self, function: Callable[[], None]) -> None:
        self._team.call_python(function)

    def close(self) -> None:
        """End the threads."""
        self._team.close()


class ReferenceDevice(HostDevice):
    """The NumPy reference ops behind a whole engine: slow, and the truth for the others."""

    name = "reference"
    runs_ahead = True  # not that it gains anything: so that every machine shows the tokens to be the same

    def __init__(self) -> None:
        from ..kernels import reference

        self.ops = reference


def physical_cores() -> int:
    """Physical cores that this process may run on; hardware threads of one core count once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(len(cores), 1)
