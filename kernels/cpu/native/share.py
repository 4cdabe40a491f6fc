"""What every kernel knows of its share of the work, and how kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

# No fast-math: it may drop infinities and NaN, and lets the compiler reorder sums, so that a result would depend on how
# its loop was compiled. error_model: division by zero gives infinity or NaN, as in NumPy, instead of raising. No NRT: a
# kernel that would allocate an array does not compile.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


class Share(NamedTuple):
    """A piece of a kernel's work: the threads of a team call the kernel once for each piece, each when it can."""

    piece: int  #: 0 .. num_pieces - 1
    num_pieces: int
    thread: int  #: the thread that does it, for memory that threads have of their own


def inner(function: F) -> F:
    """A function that kernels call; compiled into each of them."""
    compiled: F = numba.njit(**OPTIONS)(function)
    return compiled


@inner
def part(count: int, share: Share) -> tuple[int, int]:
    """Of ``count`` equal units of work, the first of this piece and the one after its last."""
    piece, num_pieces = share[0], share[1]
    return count * piece // num_pieces, count * (piece + 1) // num_pieces
