"""copy_blocks and swap_blocks, every implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.kernels import STORAGES, Implementation, assert_same_bits, cases, each_implementation, normal, store

Array = Any

#: Source and destination blocks.
COPIES = [((), ()), ((3,), (0,)), ((0, 3, 8), (4, 1, 7)), ((2, 2, 2), (5, 6, 1))]


def pools(kind: str, num_blocks: int) -> tuple[Array, Array]:
    """K and V pools [L, num_blocks, ...] of 3 layers in a storage; a block's layout is no matter to a copy."""
    keys, values = normal(1, 3, num_blocks, 2, 8, 4), normal(2, 3, num_blocks, 2, 4, 8)
    return store(keys, kind), store(values, kind)


@cases([(kind, pairs) for kind in STORAGES for pairs in COPIES], [(kind, COPIES[2]) for kind in STORAGES])
def test_copy_blocks(impl: Implementation, case: tuple[str, Any]) -> None:
    """In every layer of both caches the destinations become their sources, bit for bit, and nothing else changes."""
    kind, (src, dst) = case
    hosts = pools(kind, 9)
    devices = [impl.array(host) for host in hosts]
    impl.run("copy_blocks", *devices, impl.array(np.array(src, np.int64)), impl.array(np.array(dst, np.int64)))
    for host, device in zip(hosts, devices, strict=True):
        expected = host.copy()
        expected[:, list(dst)] = host[:, list(src)]
        assert_same_bits(impl.host(device), expected)


@each_implementation
@pytest.mark.parametrize("kind", STORAGES)
def test_swap_blocks(impl: Implementation, kind: str) -> None:
    """Blocks go to a pool of another size and back; the source stays as it is."""
    small, large = pools(kind, 4)[0], pools(kind, 9)[0] * 0
    away, back = impl.array(large), impl.array(small)
    there, here = (impl.array(np.array(blocks, np.int64)) for blocks in ((7, 0, 8), (3, 1, 0)))
    impl.run("swap_blocks", impl.array(small), away, here, there)
    expected = large.copy()
    expected[:, [7, 0, 8]] = small[:, [3, 1, 0]]
    assert_same_bits(impl.host(away), expected)
    back = impl.array(small * 0)
    impl.run("swap_blocks", away, back, there, here)
    expected = small * 0
    expected[:, [3, 1, 0]] = small[:, [3, 1, 0]]
    assert_same_bits(impl.host(back), expected)
