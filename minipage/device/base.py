"""What a device is: an array module, the ops that run on its arrays, and its memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..kernels.ops import Array, Ops


class Device(ABC):
    """An array module ``xp``, an op set ``ops`` over its arrays, and what memory there is.

    Everything above asks a device for arrays and ops; only this package knows which kind it is.
    """

    name: str
    xp: Any
    ops: Ops

    def array(self, host: np.ndarray) -> Array:
        """A host array on the device (the same object where the device is the host)."""
        return self.xp.asarray(host)

    @abstractmethod
    def host(self, array: Array) -> np.ndarray:
        """A device array on the host; waits for what writes it."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised device array."""
        return self.xp.empty(tuple(shape), dtype=dtype)

    def empty_host(self, shape: Sequence[int], dtype: Any) -> Array:
        """An uninitialised array in host memory that the device's ops can read and write."""
        return self.empty(shape, dtype)

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    @abstractmethod
    def total_memory(self) -> int:
        """Bytes that the device has in all."""

    def compute(self) -> AbstractContextManager[Any]:
        """The context that ops run under: whatever the device needs set or held meanwhile."""
        return nullcontext()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What makes the ops that ``function`` calls run, now and again, with as little Python in their way as the device can.

        The ops read and write the same arrays each time, so what is to change has to change in these. ``function`` is called
        once, at once or with the first run, and must do nothing but call ops. Runs belong inside :meth:`compute`.
        """
        return function

    def synchronize(self) -> None:  # noqa: B027  (what runs at once has nothing to wait for)
        """Wait for all ops launched so far."""

    def close(self) -> None:  # noqa: B027  (host arrays go by themselves)
        """Give back what the device holds of its own, threads and streams among it."""
