"""What this process holds: memory at its peak, pages of mapped files included, and open files."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Filled in when the measured block ends."""

    nbytes: int


@contextmanager
def measure_peak() -> Iterator[Peak]:
    """Bytes by which the resident memory grew at its peak within the block, over what it was at the start.

    Linux forgets earlier peaks when told to; elsewhere only what exceeds the highest peak so far is seen.
    """
    peak = Peak()
    if CLEAR.exists():
        CLEAR.write_text("5")
        before = from_status("VmRSS")
        yield peak
        peak.nbytes = from_status("VmHWM") - before
    else:
        before = highest_ever()
        yield peak
        peak.nbytes = highest_ever() - before


def from_status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def highest_ever() -> int:
    """The process's highest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def holds(path: Path) -> bool:
    """Whether this process maps the file or holds a descriptor of it; False where the system does not tell (no /proc)."""
    maps, descriptors = Path("/proc/self/maps"), Path("/proc/self/fd")
    if not maps.exists():
        return False
    targets = [descriptor.resolve() for descriptor in descriptors.iterdir() if descriptor.exists()]
    return path.resolve() in targets or str(path.resolve()) in maps.read_text()
