"""How much of the host's memory is free."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  #: of a container, the control group that all of it is in


def free() -> int:
    """Bytes of memory that the kernel calls available, within the control group's limit."""
    available = _available_memory()
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return available  # no control group, or "max": no limit
    return min(available, max(limit - used + _cached_files(), 0))


def _available_memory() -> int:
    """Bytes of memory that Linux calls available; elsewhere all physical memory, as POSIX tells it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cached_files() -> int:
    """Bytes of files, such as those that weights were read from, that count as used and are given up where memory is wanted."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
