"""How much of the host's memory is free."""

from __future__ import annotations

import os
from pathlib import Path


def free() -> int:
    """Bytes of memory that the kernel calls available, within the control group's limit."""
    available = _available_memory()
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return available if limit is None else min(available, max(limit - (used or 0), 0))


def _available_memory() -> int:
    """Bytes of memory that Linux calls available; elsewhere all physical memory, as POSIX tells it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None  # no control group, or "max": no limit
