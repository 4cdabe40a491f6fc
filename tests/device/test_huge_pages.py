"""Weights lie in huge pages of memory; pages of K and V begin as small ones, and become huge when they fill up."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from minipage.device.cpu import CpuDevice
from minipage.device.huge_pages import HUGE_PAGE, HugeArrays, use_huge_pages, use_small_pages
from minipage.device.kv_cache import KVCache, KVShape

has_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no transparent huge pages"
)
SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
BLOCK_BYTES = SHAPE.bytes_per_block // 6  # of K, or V, of a layer


def flags(address: int) -> set[str]:
    """What Linux was told about the memory at an address: "nh" for no huge pages, "hg" for huge ones."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no memory at {address:#x}")


@has_huge_pages
def test_pages_become_huge_when_more_than_a_few_are_written_to() -> None:
    """Some 256 KiB of K of each layer are small pages; with the first slot beyond, all is huge, and holds what it held."""
    kv = KVCache(CpuDevice(1), SHAPE, num_blocks=2000)
    few = (256 << 10) // BLOCK_BYTES
    middle = [pages.ctypes.data + pages.nbytes // 2 for pages in (kv.key, kv.value)]
    before = [np.random.default_rng(0).standard_normal(x[:, :few].shape, np.float32) for x in (kv.key, kv.value)]
    kv.key[:, :few], kv.value[:, :few] = before
    kv.expect_writes([np.array([0, 17, few * 16 - 1])])
    assert all("nh" in flags(address) for address in middle)
    kv.expect_writes([np.array([3, few * 16])])
    assert all("hg" in flags(address) and "nh" not in flags(address) for address in middle)
    for pages, expected in zip((kv.key, kv.value), before, strict=True):
        np.testing.assert_array_equal(pages[:, :few], expected)


@pytest.mark.parametrize("size", [1, 4095, 5000, (2 << 20) - 1, (4 << 20) + 7])
def test_arrays_of_any_size_may_be_advised_on(size: int) -> None:
    """Only whole pages within the array are meant: its neighbours in memory are left alone, and so is what it holds."""
    array = np.zeros((3, size), np.uint8)
    use_small_pages(array)
    array[:] = np.arange(3)[:, None] + 1
    use_huge_pages(array, size // 2)
    assert array.sum() == 6 * size


@has_huge_pages
def test_weights_share_huge_pages() -> None:
    """Weights that are smaller than a huge page lie side by side in memory that is to be huge, from its beginning on."""
    device = CpuDevice(1)
    memory = device.weight_memory()
    weights = [device.ops.empty_weight((64 * n, 576), "float16", memory) for n in range(1, 10)]
    starts = [weight.arrays[0].ctypes.data for weight in weights]
    assert starts[0] % HUGE_PAGE == 0
    assert all(stop == start + weight.nbytes for start, stop, weight in zip(starts, starts[1:], weights, strict=False))
    assert all("hg" in flags(start) for start in starts)


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (40 << 20,), (65 << 20,)])
def test_arrays_that_share_memory_are_zeros_of_their_own(shape: tuple[int, ...]) -> None:
    """Whatever the sizes, smaller or larger than what arrays share: zeros at first, at a cache line, and no byte of another's."""
    memory = HugeArrays()
    first, second, third = memory.zeros((5,), np.int16), memory.zeros(shape, np.uint8), memory.zeros((3,), np.float32)
    assert second.shape == shape and not second.any()
    assert all(array.ctypes.data % 64 == 0 for array in (first, second, third))
    first[:], third[:] = 1, 1
    assert not second.any()
    second[...] = 255
    assert (first == 1).all() and (third == 1).all()
