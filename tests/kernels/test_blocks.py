"""copy_blocks and swap_blocks, every implementation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from helpers.kernels import PAGE_KINDS, Implementation, assert_same_bits, cases, int8_keys, int8_values, normal, store

Array = Any


class Copies(NamedTuple):
    """Source and destination blocks, in pages of a kind."""

    src: tuple[int, ...]
    dst: tuple[int, ...]
    kind: str = "float32"


COPIES = [Copies((), ()), Copies((3,), (0,)), Copies((0, 3, 8), (4, 1, 7)), Copies((2, 2, 2), (5, 6, 1))]
SWAPS = [Copies((3, 1, 0), (7, 0, 8), kind) for kind in PAGE_KINDS]


def pools(kind: str, num_blocks: int) -> tuple[Array, Array]:
    """K and V pools [L, num_blocks, ...] of 3 layers in a storage; a block's layout is no matter to a copy."""
    keys, values = normal(1, 3, num_blocks, 2, 8, 4), normal(2, 3, num_blocks, 2, 4, 8)
    if kind == "int8":
        return np.stack(list(map(int8_keys, keys))), np.stack(list(map(int8_values, values)))
    return store(keys, kind), store(values, kind)


@cases(
    [copies._replace(kind=kind) for kind in PAGE_KINDS for copies in COPIES],
    [COPIES[2]._replace(kind=kind) for kind in PAGE_KINDS],
)
def test_copy_blocks(impl: Implementation, case: Copies) -> None:
    """In every layer of both caches the destinations become their sources, bit for bit, and nothing else changes."""
    src, dst, kind = case
    hosts = pools(kind, 9)
    devices = [impl.array(host) for host in hosts]
    impl.run("copy_blocks", *devices, impl.array(np.array(src, np.int64)), impl.array(np.array(dst, np.int64)))
    for host, device in zip(hosts, devices, strict=True):
        expected = host.copy()
        expected[:, list(dst)] = host[:, list(src)]
        assert_same_bits(impl.host(device), expected)


@cases(SWAPS, SWAPS)
def test_swap_blocks(impl: Implementation, case: Copies) -> None:
    """Blocks of K and of V go to pools of another size and back; the sources stay as they are."""
    small, large = pools(case.kind, 4), [pool * 0 for pool in pools(case.kind, 9)]
    there, here = impl.array(np.array(case.dst, np.int64)), impl.array(np.array(case.src, np.int64))
    near, away = [impl.array(pool) for pool in small], [impl.array(pool) for pool in large]
    impl.run("swap_blocks", *near, *away, here, there)
    for host, pool, source, device in zip(small, away, near, large, strict=True):
        expected = device.copy()
        expected[:, [7, 0, 8]] = host[:, [3, 1, 0]]
        assert_same_bits(impl.host(pool), expected)
        assert_same_bits(impl.host(source), host)
    back = [impl.array(pool * 0) for pool in small]
    impl.run("swap_blocks", *away, *back, there, here)
    for host, pool in zip(small, back, strict=True):
        expected = host * 0
        expected[:, [3, 1, 0]] = host[:, [3, 1, 0]]
        assert_same_bits(impl.host(pool), expected)


@cases([(1, 1, 1), (3, 5, 1), (1, 3, 7), (2, 4, 66)], [(1, 3, 7), (2, 4, 66)])
def test_blocks_of_any_size(impl: Implementation, case: tuple[int, int, int]) -> None:
    """Blocks whose bytes are a multiple of 16 or not, and more of them than one pass of a thread block copies."""
    keys, values = (store(normal(seed, 2, 5, *case), "float16") for seed in (1, 2))
    devices = impl.array(keys), impl.array(values)
    impl.run("copy_blocks", *devices, impl.array(np.array([0, 4])), impl.array(np.array([3, 1])))
    for host, device in zip((keys, values), devices, strict=True):
        expected = host.copy()
        expected[:, [3, 1]] = host[:, [0, 4]]
        assert_same_bits(impl.host(device), expected)
