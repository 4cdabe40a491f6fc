"""How much memory of the host is free, by what Linux says of the machine and of the control group of a container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from minipage.device import host_memory
from minipage.device.kv_cache import KVShape, plan_num_host_blocks

MACHINE = 1000 << 20  #: that the machine has free
STAT = "anon 100\ninactive_file 3000\nactive_file 200\nunevictable 7\nslab_reclaimable 50\n"


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Writes files of a control group."""
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_available_memory", lambda: MACHINE)

    def write(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)

    return write


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [
        ("10000\n", "8000\n", 5200),
        ("10000\n", "20000\n", 0),
        (f"{1 << 60}\n", "8000\n", MACHINE),
        ("max\n", "8000\n", MACHINE),
    ],
    ids=["a limit", "more used than that", "more than the machine has", "none"],
)
def test_memory_of_a_control_group(put: Callable[[Mapping[str, str]], None], limit: str, used: str, free: int) -> None:
    """What is left of its limit; files that Linux keeps at hand, such as the weights just read, make room for others."""
    put({"memory.max": limit, "memory.current": used, "memory.stat": STAT})
    assert host_memory.free() == free


def test_a_control_group_that_does_not_tell_of_files(put: Callable[[Mapping[str, str]], None]) -> None:
    """All that is used counts, as it may where a sandbox plays the kernel."""
    put({"memory.max": "10000\n", "memory.current": "8000\n"})
    assert host_memory.free() == 2000


def test_memory_without_a_control_group(put: Callable[[Mapping[str, str]], None]) -> None:
    """What the machine has."""
    put({})
    assert host_memory.free() == MACHINE


def test_no_swap_space_always_fits() -> None:
    """Where less than nothing is left, since others took memory after the pages were planned, nothing still is there."""
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    assert plan_num_host_blocks(shape, 0, -1) == 0
