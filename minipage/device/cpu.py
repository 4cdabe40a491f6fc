"""The CPU: NumPy arrays, Numba kernels on a number of threads; and the reference device, plain NumPy, for tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..errors import InvalidArgumentError
from ..kernels.ops import Array, Ops
from .base import Device

# Numba's threading layers are not all safe to enter from two threads at once, so steps of all engines take turns.
_COMPUTE_LOCK = threading.Lock()


class HostDevice(Device):
    """What all devices in host memory share."""

    xp = np

    def host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def free_memory(self) -> int:
        """Bytes of memory that the kernel calls available, within the control group's limit."""
        available = _meminfo("MemAvailable")
        limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
        return available if limit is None else min(available, max(limit - (used or 0), 0))

    def total_memory(self) -> int:
        """Bytes of memory of the machine, or of the control group where that is less."""
        total, limit = _meminfo("MemTotal"), _cgroup_bytes("memory.max")
        return total if limit is None else min(total, limit)


class CpuDevice(HostDevice):
    """Numba kernels on ``num_threads`` threads (default: the physical cores that this process may use)."""

    name = "cpu"

    def __init__(self, num_threads: int | None = None) -> None:
        import numba

        from ..kernels import cpu

        most = int(numba.config.NUMBA_NUM_THREADS)
        if num_threads is not None and num_threads > most:
            raise InvalidArgumentError(
                f"num_threads={num_threads} is not allowed; this process may use 1 to {most} (NUMBA_NUM_THREADS sets the most)"
            )
        self.num_threads = num_threads or min(most, physical_cores())
        self.ops = cast(Ops, cpu)
        self._set_num_threads = numba.set_num_threads

    def compute(self) -> AbstractContextManager[Any]:
        return self._computing()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with _COMPUTE_LOCK:
            self._set_num_threads(self.num_threads)
            yield


class ReferenceDevice(HostDevice):
    """The NumPy reference ops behind a whole engine: slow, and the truth for the others."""

    name = "reference"

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


def _meminfo(field: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    except OSError:
        pass
    # No /proc: all physical memory, as POSIX tells it.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None  # no control group, or "max": no limit
