"""How the kernels of this package are compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

# OpenMP's threads spin while they wait, and on a machine that has other work they take its cores from those that they wait
# for: a step then takes ten times as long. The library reads this when its threads are first used.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

F = TypeVar("F", bound=Callable[..., Any])

# No fast-math: it may drop infinities and NaN, and lets the compiler reorder sums, so that a result would depend on how
# its loop was compiled. error_model: division by zero gives infinity or NaN, as in NumPy, instead of raising.
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def inner(function: F) -> F:
    """A function that kernels call; compiled into each of them."""
    compiled: F = numba.njit(**_OPTIONS)(function)
    return compiled


#: Signatures of arrays that are only read, and may be read-only.
INPUT_VECTOR = "Array(float32, 1, 'C', readonly=True)"
INPUT_MATRIX = "Array(float32, 2, 'C', readonly=True)"


class Kernel:
    """A function that Python calls, with one signature; compiled when it is first called, and cached on disk.

    One signature and not Numba's own dispatch, which would compile a function anew for every memory layout it meets: a
    view of some columns counts as contiguous for one token and as strided for more. An array that does not fit the
    signature raises TypeError.

    Signatures are in Numba's notation: ``float32[:, ::1]`` is contiguous, ``float32[:, :]`` may be strided.
    """

    def __init__(self, function: Callable[..., Any], signature: str, *, parallel: bool = False) -> None:
        self._function = function
        self._signature = f"void({signature})"
        self._parallel = parallel
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> None:
        if self._compiled is None:
            self._compiled = self._compile()
        self._compiled(*args)

    def _compile(self) -> Callable[..., Any]:
        if numba.config.DISABLE_JIT:
            return self._function
        dispatcher = numba.njit(parallel=self._parallel, **_OPTIONS)(self._function)
        try:
            dispatcher.enable_caching()
        except RuntimeError:
            pass  # no folder to write to: compile in every process
        else:
            # Numba compares a cached function with its own file only; a change of a function that it calls counts too.
            dispatcher._cache._cache_file._source_stamp = _SOURCE_STAMP
        dispatcher.compile(self._signature)
        dispatcher.disable_compile()
        return dispatcher  # type: ignore[no-any-return]


def source_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What identifies the state of all sources in ``folder``: names, times of change in ns, and sizes."""
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


# Taken when the sources are imported: by the first call somebody may have edited them.
_SOURCE_STAMP = source_stamp(Path(__file__).parent)
