"""Ranks: the processes that compute one model together, and what they tell each other.

Data for Python and arrays in host memory go by MPI (mpi4py), arrays on GPUs by NCCL (``cupyx.distributed``). Either way the
processes are started together, by ``mpiexec -n N``, and all run the same program.
"""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..errors import InvalidArgumentError, RankError
from ..kernels.ops import Array

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 20e-6, 1e-3, 1.1  #: seconds between two looks for a message; and how they grow


class Communicator:
    """What a rank that is alone says to nobody; :class:`MpiCommunicator` is one of several."""

    rank = 0
    size = 1
    local_rank = 0  #: of the ranks that run on this machine
    local_size = 1
    num_gathers = 0  #: calls of :meth:`all_gather` so far, begun ones included

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, in their order. All have to call it."""
        return [value]

    def all_gather(self, out: Array, x: Array) -> None:
        """out [size, ...] = ``x`` of each rank, contiguous arrays of one shape on the device. All have to call it."""
        raise RuntimeError("a rank that is alone has nothing to gather")

    def catch_up(self, last: int, shape: tuple[int, ...]) -> None:
        """Take part in what is left of ``last`` calls of :meth:`all_gather`, with any float32 of that shape.

        For a rank that fails in the middle of a step, since the others wait for it.
        """

    def gather(self, x: np.ndarray) -> np.ndarray | None:
        """The host arrays ``x`` of all ranks as one [size, ...] on rank 0, None on the others. All have to call it."""
        return x[None]

    def send(self, message: Any) -> None:
        """From rank 0: tell all others; see :meth:`receive`."""

    def receive(self) -> Any:
        """On another rank: the next message of rank 0. Waits asleep, however long that takes."""
        raise RuntimeError("a rank that is alone is sent no messages")

    def num_sharing(self) -> int:
        """How many ranks run on the processor cores of this one, it among them. All have to call it."""
        return 1

    def together(self, work: Callable[[], T]) -> T:
        """Do ``work`` on all ranks, which all have to call it. Where it fails on any, it fails on all: a rank raises its own
        error, and RankError where it has none, or the one that rank 0 has as well.
        """
        failures: list[str | None]
        try:
            done = work()
        except BaseException as error:
            failures = self.exchange(f"{type(error).__name__}: {error}")
            if self.rank == 0 or failures[self.rank] != failures[0]:
                raise
        else:
            failures = self.exchange(None)
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RankError(rank, self.size, failure)
        return done


class MpiCommunicator(Communicator):
    """A rank of those that ``mpiexec`` started."""

    def __init__(self, mpi: Any) -> None:
        """``mpi`` is a communicator of mpi4py. What is sent here does not mix with what others send over it."""
        self.mpi = mpi.Dup()
        self.rank, self.size = self.mpi.Get_rank(), self.mpi.Get_size()
        hosts = self.exchange(platform.node())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def exchange(self, value: T) -> list[T]:
        values: list[T] = self.mpi.allgather(value)
        return values

    def all_gather(self, out: Array, x: Array) -> None:
        self.num_gathers += 1
        self.mpi.Allgather(x, out)

    def catch_up(self, last: int, shape: tuple[int, ...]) -> None:
        x, out = np.zeros(shape, np.float32), np.empty((self.size, *shape), np.float32)
        while self.num_gathers < last:
            self.all_gather(out, x)

    def gather(self, x: np.ndarray) -> np.ndarray | None:
        out = np.empty((self.size, *x.shape), x.dtype) if self.rank == 0 else None
        self.mpi.Gather(np.ascontiguousarray(x), out)
        return out

    def send(self, message: Any) -> None:
        for rank in range(1, self.size):
            self.mpi.send(message, rank)

    def receive(self) -> Any:
        # MPI itself would wait by looking all the time, and keep a core busy while nobody asks anything.
        pause = _FIRST_PAUSE
        while not self.mpi.Iprobe(source=0):
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)
        return self.mpi.recv(source=0)

    def num_sharing(self) -> int:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        place = platform.node(), cores
        return self.exchange(place).count(place)


class NcclCommunicator(MpiCommunicator):
    """A rank that computes on a GPU of its own: its arrays go by NCCL, on CuPy's current stream."""

    def __init__(self, mpi: Any) -> None:
        """The GPU of this rank must be the current one. Raises InvalidArgumentError where there is no NCCL."""
        super().__init__(mpi)
        from cupyx import distributed

        try:
            self._nccl = distributed.init_process_group(self.size, self.rank, use_mpi=True)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"tensor_parallel_size={self.size} on GPUs needs NCCL ({error}); allowed: with the package nvidia-nccl-cu12 or "
                "nvidia-nccl-cu13, as the driver's CUDA version is"
            ) from error

    def all_gather(self, out: Array, x: Array) -> None:
        self._nccl.all_gather(x, out, x.size)

    def catch_up(self, last: int, shape: tuple[int, ...]) -> None:
        """Not on GPUs, where graphs gather without being counted, and of which most failures are final: all ranks end."""
        traceback.print_exc()
        self.mpi.Abort(1)


def join_ranks(size: int) -> Communicator:
    """This process as one of ``size`` ranks. Raises InvalidArgumentError where ``mpiexec`` has not started so many."""
    if size == 1:
        return Communicator()
    name = f"tensor_parallel_size={size}"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, and no MPI library
        raise InvalidArgumentError(
            f"{name} needs MPI, which cannot be loaded ({error}); allowed: 1, or any with the extra minipage[dist] installed"
        ) from error
    found = MPI.COMM_WORLD.Get_size()
    if found != size:
        raise InvalidArgumentError(
            f"{name} needs as many processes, and there are {found}; allowed: {found}, or start the program by "
            f"mpiexec -n {size}"
        )
    return MpiCommunicator(MPI.COMM_WORLD)
