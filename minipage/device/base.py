"""What a device is: an array module, the ops that run on its arrays, and its memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..kernels.ops import Array, Ops
from . import host_memory
from .communicator import Communicator


class StepShape(NamedTuple):
    """How large the batch of a step is."""

    num_tokens: int
    num_seqs: int
    num_blocks: int  #: of the longest block table


class Device(ABC):
    """An array module ``xp``, an op set ``ops`` over its arrays, and what memory there is.

    Everything above asks a device for arrays and ops; only this package knows which kind it is.
    """

    name: str
    xp: Any
    ops: Ops
    has_own_memory = False  #: whether its memory is apart from the host's
    communicator = Communicator()  #: to the other ranks, where several compute a model together
    runs_ahead = False  #: whether ops go on running when their calls have returned, so that Python has time meanwhile

    def array(self, host: np.ndarray) -> Array:
        """A host array on the device (the same object where the device is the host)."""
        return self.xp.asarray(host)

    @abstractmethod
    def host(self, array: Array) -> np.ndarray:
        """A device array on the host; waits for what writes it."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised device array."""
        return self.xp.empty(tuple(shape), dtype=dtype)

    def weight_memory(self) -> Any:
        """What makes the arrays of a model's weights, as the array module's ``zeros`` does: a new one for each model."""
        return self.xp

    def empty_pages(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised device array [L, num_blocks, ...] for pages, of which no more than a few blocks may ever be used."""
        return self.empty(shape, dtype)

    def fill_pages(self, pages: Array, num_blocks: int) -> None:  # noqa: B027  (most need no telling)
        """Be told that of :meth:`empty_pages` the first ``num_blocks`` blocks are in use, and more will be."""

    def empty_host(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised array in host memory that the device's ops can read and write."""
        return self.empty(shape, dtype)

    def staging(self, num_bytes: int) -> np.ndarray:
        """Uninitialised bytes on the host, from which copies to the device are fast."""
        return np.empty(num_bytes, np.uint8)

    def send(self, to: Array, source: np.ndarray) -> Callable[[], None]:
        """Copy ``source``, bytes of :meth:`staging`, to bytes on the device: there before whatever op is called next.

        What is returned waits until ``source`` may change again.
        """
        to[...] = self.array(source)
        return _do_nothing

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """Begin to copy an array to the host, as the ops called so far leave it; what is returned waits for the copy."""
        copied = self.host(array).copy()
        return lambda: copied

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    def free_host_memory(self) -> int:
        """Bytes of host memory that :meth:`empty_host` could take now: this rank's share of them."""
        return host_memory.free() // self.communicator.local_size

    def memory_for_cache(self, utilization: float | None) -> int:
        """Bytes for the KV cache where nobody says how many, the weights loaded already: half of what is free.

        ``utilization``, for a device that has its own memory, is the part of all its memory that may be in use then.
        """
        return self.free_memory() // 2

    def allocating(self) -> AbstractContextManager[Any]:
        """The context in which memory is taken; raises OutOfMemoryError where there is too little, if that can be told."""
        return nullcontext()

    def begin_thread(self) -> None:  # noqa: B027  (most devices are those of all threads)
        """Be told by a new thread that it makes and fills arrays, outside :meth:`compute`."""

    def compute(self) -> AbstractContextManager[Any]:
        """The context that ops run under: whatever the device needs set or held meanwhile."""
        return nullcontext()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What makes the ops that ``function`` calls run, now and again, with as little Python in their way as the device can.

        The ops read and write the same arrays each time, so what is to change has to change in these. ``function`` must do
        nothing but call ops, and may be called any number of times. This and all runs belong inside :meth:`compute`.
        """
        return function

    def recorded_rows(self, num_rows: int, most: int) -> int | None:
        """How many rows of at most ``most`` to record ops for, so that few recordings serve all numbers of rows; None: as
        many as there are, without recording.
        """
        return num_rows

    def recorded_shape(self, shape: StepShape, most: StepShape) -> StepShape | None:
        """What a step is padded to before its ops are recorded, within ``most``; None: it is not worth recording."""
        return shape._replace(num_blocks=most.num_blocks)

    def join(self, communicator: Communicator) -> None:
        """Be one of several ranks from now on. All of them have to call it."""
        self.communicator = communicator

    def new_all_reduce(self, max_rows: int, num_columns: int) -> Callable[[Array], None]:
        """An op that makes of ``x`` [rows, columns] float32, contiguous, the sum of what all ranks have there.

        It adds in the order of the ranks, so that all of them get the same bits, whatever the number of rows. All have to call
        it. It may be recorded as the ops of ``ops`` are.
        """
        size = self.communicator.size
        if size == 1:
            return lambda x: None
        room = self.empty((size * max_rows, num_columns), np.float32)

        def all_reduce(x: Array) -> None:
            parts = room[: size * len(x)].reshape(size, len(x), num_columns)
            self._call(partial(self.communicator.all_gather, parts, x))
            self.ops.add(x, parts[0], parts[1])
            for part in parts[2:]:
                self.ops.add(x, x, part)

        return all_reduce

    def _call(self, function: Callable[[], None]) -> None:
        """Call what is no op, in its place among ops that are recorded."""
        function()

    def synchronize(self) -> None:  # noqa: B027  (what runs at once has nothing to wait for)
        """Wait for all ops launched so far."""

    def close(self) -> None:  # noqa: B027  (host arrays go by themselves)
        """Give back what the device holds of its own, threads and streams among it."""


def _do_nothing() -> None:
    """Waits for what has happened already."""
