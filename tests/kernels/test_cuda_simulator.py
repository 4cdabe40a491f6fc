"""The simulator's scheduler: it does what CUDA does, and finds what CUDA would not forgive."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minipage.device import open_device

pytest.importorskip("numba_cuda")
pytest.importorskip("greenlet")
open_device("cuda-sim")  # turns the simulator on, before Numba's CUDA target is first imported
target = importlib.import_module("minipage.kernels.cuda.target")
simulator = importlib.import_module("minipage.kernels.cuda.simulator")
cuda, kernel, launch = target.cuda, target.kernel, target.launch

ALL_LANES = 0xFFFFFFFF
SEEDS = ("1", "2", "3")


def run(function: Any, threads: int = 32, blocks: int = 1, dtype: Any = np.float32) -> np.ndarray:
    """What a kernel of one argument leaves in an array of zeros, an element a thread."""
    out = np.zeros(threads * blocks, dtype)
    launch(kernel(function), (blocks,), threads, out)
    return out


def left_neighbours(barrier: bool) -> Callable[[Any], None]:
    """Each thread leaves its number in shared memory and reads its left neighbour's."""

    def with_barrier(out: Any) -> None:
        shared, i = cuda.shared.array(32, np.float32), cuda.threadIdx.x
        shared[i] = i
        cuda.syncthreads()
        out[i] = shared[max(i - 1, 0)]

    def without_barrier(out: Any) -> None:
        shared, i = cuda.shared.array(32, np.float32), cuda.threadIdx.x
        shared[i] = i
        out[i] = shared[max(i - 1, 0)]

    return with_barrier if barrier else without_barrier


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_shows_in_a_shuffled_order(monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
    """A kernel that is right only when threads run by number reads poison under a seed; with the barrier it is right."""
    monkeypatch.delenv("MINIPAGE_SIMULATOR_SEED", raising=False)
    expected = np.maximum(np.arange(32) - 1, 0)
    assert np.array_equal(run(left_neighbours(barrier=False)), expected)
    monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", seed)
    assert np.isnan(run(left_neighbours(barrier=False))).any()
    assert np.array_equal(run(left_neighbours(barrier=True)), expected)


def test_a_warp_that_is_ahead_shows_what_others_have_yet_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp may finish all its shuffles and write before another has read at all: under some seeds one does."""

    def sums_of_warps(out: Any) -> None:
        shared, i = cuda.shared.array(2, np.float32), cuda.threadIdx.x
        shared[i // 32] = 1
        cuda.syncthreads()
        out[i] = shared[1 - i // 32]
        value = i
        for distance in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(ALL_LANES, value, distance)
        shared[i // 32] = value

    wrong = 0
    for seed in "12345678":
        monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", seed)
        wrong += not np.array_equal(run(sums_of_warps, threads=64), np.ones(64))
    assert wrong > 0


def test_a_barrier_that_some_threads_never_reach_raises() -> None:
    """Threads that return before a barrier make it an error that counts them and names the line, not a hang."""

    def half_leave(out: Any) -> None:
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    with pytest.raises(simulator.DivergenceError, match=r"16 wait in syncthreads at .*\.py:\d+, 16 have returned"):
        run(half_leave)


def test_threads_at_different_barriers_raise() -> None:
    """A barrier is one place in the code: threads that wait at two places never meet."""

    def two_barriers(out: Any) -> None:
        if cuda.threadIdx.x % 2:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    with pytest.raises(simulator.DivergenceError, match=r"16 wait in syncthreads .*, 16 wait in syncthreads"):
        run(two_barriers)


def test_a_shuffle_without_all_its_lanes_raises() -> None:
    """A warp operation waits for exactly the lanes of its mask."""

    def absent_lane(out: Any) -> None:
        if cuda.threadIdx.x != 5:
            cuda.shfl_sync(ALL_LANES, 1, 0)

    with pytest.raises(simulator.DivergenceError, match="31 wait in shfl_sync"):
        run(absent_lane)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda i: cuda.shfl_sync(ALL_LANES, i, 7), np.full(32, 7)),
        (lambda i: cuda.shfl_xor_sync(ALL_LANES, i, 5), np.arange(32) ^ 5),
        (
            lambda i: cuda.shfl_down_sync(ALL_LANES, i, 3),
            np.where(np.arange(32) < 29, np.arange(32) + 3, np.arange(32)),
        ),
        (lambda i: cuda.shfl_up_sync(ALL_LANES, i, 3), np.where(np.arange(32) >= 3, np.arange(32) - 3, np.arange(32))),
        (lambda i: cuda.ballot_sync(ALL_LANES, i % 2), np.full(32, 0xAAAAAAAA)),
        (lambda i: cuda.match_any_sync(ALL_LANES, i % 2), np.tile([0x55555555, 0xAAAAAAAA], 16)),
        (lambda i: cuda.any_sync(ALL_LANES, i == 31), np.full(32, 1)),
        (lambda i: cuda.all_sync(ALL_LANES, i < 31), np.full(32, 0)),
    ],
    ids=["shfl", "shfl_xor", "shfl_down", "shfl_up", "ballot", "match_any", "any", "all"],
)
def test_warp_operations(operation: Callable[[int], Any], expected: np.ndarray) -> None:
    """Each of two warps exchanges values among its own lanes as CUDA defines it."""

    def both_warps(out: Any) -> None:
        out[cuda.threadIdx.x] = operation(cuda.threadIdx.x % 32)

    assert np.array_equal(run(both_warps, threads=64, dtype=np.int64), np.tile(expected, 2))


def test_a_mask_of_a_few_lanes_meets_without_the_others() -> None:
    """Lanes outside the mask go on by themselves."""

    def low_lanes(out: Any) -> None:
        i = cuda.threadIdx.x
        if i < 4:
            out[i] = cuda.shfl_xor_sync(0xF, i, 1)

    assert np.array_equal(run(low_lanes)[:5], [1, 0, 3, 2, 0])


def test_block_votes_count_all_threads() -> None:
    """syncthreads_count, _and and _or give every thread of the block the same answer."""

    def votes(out: Any) -> None:
        i = cuda.threadIdx.x
        out[i] = 100 * cuda.syncthreads_count(i < 40) + 10 * cuda.syncthreads_and(i < 40) + cuda.syncthreads_or(i < 40)

    assert np.array_equal(run(votes, threads=64), np.full(64, 4001))


def test_memory_is_poisoned_in_every_block() -> None:
    """Shared and local arrays begin as NaN (floats) or -1 (integers), also where an earlier block wrote them."""

    def read_then_write(out: Any) -> None:
        floats, integers = cuda.shared.array(1, np.float32), cuda.shared.array(1, np.int32)
        local = cuda.local.array(1, np.float32)
        out[cuda.blockIdx.x] = np.isnan(floats[0]) and integers[0] == -1 and np.isnan(local[0])
        floats[0], integers[0], local[0] = 0, 0, 0

    assert np.array_equal(run(read_then_write, threads=1, blocks=3), [1, 1, 1])


def test_an_error_names_its_thread() -> None:
    """An exception inside a kernel keeps its type and says which thread of which block raised it."""

    def out_of_bounds(out: Any) -> None:
        out[cuda.threadIdx.x + 1] = 1

    with pytest.raises(IndexError) as caught:
        run(out_of_bounds, threads=8)
    assert caught.value.__notes__ == ["in thread (7, 0, 0) of block (0, 0, 0)"]


def test_overflow_is_silent_and_the_next_launch_works() -> None:
    """float32 overflow gives infinity without a warning, as on a GPU; a failed launch leaves nothing behind."""

    def overflow(out: Any) -> None:
        out[cuda.threadIdx.x] = np.float32(3e38) * np.float32(10)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isinf(run(overflow)).all()


def test_launch_writes_through_views_and_skips_empty_grids() -> None:
    """Arrays are used where they are, strides and all; a grid with no blocks launches nothing."""

    def number(out: Any) -> None:
        out[cuda.blockIdx.x] = cuda.blockIdx.x + 1

    whole = np.zeros(6)
    launch(kernel(number), (3,), 1, whole[::2])
    launch(kernel(number), (0,), 1, whole)
    assert np.array_equal(whole, [1, 0, 2, 0, 3, 0])
