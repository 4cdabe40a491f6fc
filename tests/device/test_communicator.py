"""What ranks tell each other, and how their arrays are added up; MPI and NCCL themselves are stood in for here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minipage.device import Communicator, Device, open_device
from minipage.device.communicator import MpiCommunicator, NcclCommunicator
from minipage.errors import InvalidArgumentError, RankError

ROWS, COLUMNS = 5, 7


class Threads:
    """What the threads of a test, which play the ranks, share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def run(self, work: Callable[[Communicator], Any]) -> list[Any]:
        """What ``work`` returns, or raises, on each rank."""

        def outcome(rank: int) -> Any:
            try:
                return work(ThreadRank(self, rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(outcome, range(self.size)))


class ThreadRank(Communicator):
    """A rank that is a thread."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.size = threads, rank, threads.size

    def exchange(self, value: Any) -> list[Any]:
        self._threads.values[self.rank] = value
        self._threads.barrier.wait(60)
        found = list(self._threads.values)
        self._threads.barrier.wait(60)
        return found

    def all_gather(self, out: Any, x: Any) -> None:
        out[:] = self.exchange(x.copy())


def addends(size: int) -> np.ndarray:
    """What ranks have to add, float32 [size, rows, columns]; in another order the sum has other bits."""
    return (
        np.random.default_rng(4).normal(0, 10.0 ** np.arange(size)[:, None, None], (size, ROWS, COLUMNS)).astype("f4")
    )


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_the_order_of_the_ranks(size: int, name: str) -> None:
    """All ranks get the same bits, those of adding rank after rank, for any number of rows; again when a recording is run."""
    x = addends(size)
    expected = x[0].copy()
    for part in x[1:]:
        expected += part
    assert size == 2 or not np.array_equal(expected, sum(x[::-1]))

    def work(communicator: Communicator) -> list[np.ndarray]:
        device = open_device(name, 1)
        device.join(communicator)
        all_reduce = device.new_all_reduce(ROWS + 2, COLUMNS)
        found = []
        for rows in (ROWS, 1):
            mine = np.empty((rows, COLUMNS), np.float32)
            with device.compute():
                run = device.record(lambda mine=mine: all_reduce(mine))
                for _ in range(2):
                    mine[:] = x[communicator.rank, :rows]
                    run()
                    found.append(mine.copy())
        device.close()
        return found

    for whole, whole_again, first, first_again in Threads(size).run(work):
        np.testing.assert_array_equal(whole.view(np.int32), expected.view(np.int32))
        np.testing.assert_array_equal(whole_again, whole)
        np.testing.assert_array_equal(first, expected[:1])
        np.testing.assert_array_equal(first_again, first)


def test_one_rank_adds_nothing() -> None:
    """Its sum is what it has, and no room is taken."""
    device: Device = open_device("reference")
    x = np.ones((2, 3), np.float32)
    device.new_all_reduce(1 << 40, 1 << 20)(x)
    assert np.all(x == 1)


def test_what_fails_on_one_fails_on_all() -> None:
    """A rank raises its own error; where it has none, or that of rank 0, one that names the first that has."""

    def work(communicator: Communicator) -> str:
        def part() -> str:
            if communicator.rank:
                raise ValueError(f"bad luck of {communicator.rank}")
            return "done"

        return communicator.together(part)

    def failing(communicator: Communicator) -> None:
        def part() -> None:
            raise ValueError("bad luck of all")

        communicator.together(part)

    zero, one, two = Threads(3).run(work)
    assert isinstance(zero, RankError) and str(zero) == "rank 1 of 3 failed: ValueError: bad luck of 1"
    assert isinstance(one, ValueError) and isinstance(two, ValueError)
    zero, one = Threads(2).run(failing)
    assert isinstance(zero, ValueError)
    assert isinstance(one, RankError) and one.rank == 0
    assert Threads(2).run(lambda communicator: communicator.together(lambda: communicator.rank)) == [0, 1]
    assert Communicator().together(lambda: 7) == 7


class FakeMpi:
    """As much of mpi4py's communicator as a rank alone needs."""

    def Dup(self) -> FakeMpi:
        return self

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def test_each_machine_counts_its_ranks() -> None:
    """Which GPU a rank has, and which part of the memory, goes by the ranks of its own machine."""

    class Rank3(FakeMpi):
        def Get_rank(self) -> int:
            return 3

        def Get_size(self) -> int:
            return 5

        def allgather(self, value: Any) -> list[Any]:
            return ["elsewhere", value, "elsewhere", value, value]

    rank = MpiCommunicator(Rank3())
    assert (rank.local_rank, rank.local_size) == (1, 3)


def test_arrays_on_gpus_go_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's NCCL is set up over MPI, and given input, output and the number of elements of one rank."""
    calls: list[Any] = []

    class Nccl:
        def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
            calls.append((in_array.shape, out_array.shape, count, stream))

    def init_process_group(n_devices: int, rank: int, *, use_mpi: bool) -> Nccl:
        calls.append((n_devices, rank, use_mpi))
        return Nccl()

    cupyx, distributed = ModuleType("cupyx"), ModuleType("cupyx.distributed")
    monkeypatch.setattr(cupyx, "distributed", distributed, raising=False)
    monkeypatch.setattr(distributed, "init_process_group", init_process_group, raising=False)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    communicator = NcclCommunicator(FakeMpi())
    communicator.all_gather(np.empty((1, 4, 3), np.float32), np.empty((4, 3), np.float32))
    assert calls == [(1, 0, True), ((4, 3), (1, 4, 3), 12, None)]

    def without(*args: Any, **keywords: Any) -> None:
        raise RuntimeError("NCCL is not available")

    monkeypatch.setattr(distributed, "init_process_group", without)
    with pytest.raises(
        InvalidArgumentError, match=r"needs NCCL .NCCL is not available.; allowed: with the package nvidia-nccl"
    ):
        NcclCommunicator(FakeMpi())
