"""What every kernel knows of the team that runs it, and how kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

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
    """A thread's share of a kernel's work. The threads of a team all run the kernel, each with a share of its own."""

    thread: int  #: 0 .. num_threads - 1
    num_threads: int
    tasks: Any  #: address of a counter, 0 when the kernel begins, that the threads take tasks from


def inner(function: F) -> F:
    """A function that kernels call; compiled into each of them."""
    compiled: F = numba.njit(**OPTIONS)(function)
    return compiled


@inner
def part(count: int, share: Share) -> tuple[int, int]:
    """The first of ``count`` equal pieces of work that are this thread's, and the one after the last."""
    thread, num_threads = share[0], share[1]
    return count * thread // num_threads, count * (thread + 1) // num_threads


def _take_in_python(share: Share, count: int) -> int:
    first = share.tasks[0]
    share.tasks[0] += count
    return int(first)


@intrinsic  # type: ignore[untyped-decorator]
def _take_compiled(context: Any, share: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(builder.extract_value(args[0], 2), ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, args[1], "monotonic")

    return types.int64(share, types.int64), generate


#: ``take(share, count)``: the first of the next ``count`` tasks that no thread has taken yet. For work of uneven size.
take = _take_in_python if numba.config.DISABLE_JIT else _take_compiled
