"""What the threads of a team run: the calls of a program, one after the other, each by all threads together.

A thread that waits spins for a moment, then yields its core, then sleeps: an idle team costs nothing, a busy machine slows it
down and never stalls it.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...ops import Array
from .share import Share, inner

#: Words of a team's state, each in a cache line of its own.
JOB, ARRIVED, PHASE, SLEEPING, CALLS, NUM_CALLS, TASKS, STOPPING = range(0, 64, 8)
STATE_WORDS = 64

_SPINS = 2000
_YIELDS = 20
_WORD = ir.IntType(64)
_MACHINE = platform.machine()
_PAUSE = "llvm.x86.sse2.pause"


def work(state: Array, share: Share) -> None:
    """The life of a thread of the team: it runs the programs that thread 0 leads."""
    job = 0
    while True:
        _wait_while(state, JOB, job)
        job += 1
        if _load(state, STOPPING):
            return
        _run(state, share)


def lead(state: Array, calls: Array, share: Share) -> None:
    """Thread 0 runs a program [n, 2] of (code, words) with the others; returns when all have done."""
    state[CALLS] = _address(calls)
    state[NUM_CALLS] = len(calls)
    if share[1] > 1:
        _announce(state, JOB)
    _run(state, share)


def stop(state: Array, share: Share) -> None:
    """Let the other threads end."""
    state[STOPPING] = 1
    _announce(state, JOB)


@inner
def _run(state: Array, share: Share) -> None:
    calls, num_calls = state[CALLS], state[NUM_CALLS]
    tasks = _address(state) + 8 * TASKS
    for i in range(num_calls):
        _call(calls + 16 * i, share[0], share[1], tasks)
        _meet(state, share[1])


@inner
def _meet(state: Array, num_threads: int) -> None:
    """A barrier: nobody goes on before all have come."""
    if num_threads == 1:
        state[TASKS] = 0
        return
    phase = _load(state, PHASE)
    if _add(state, ARRIVED, 1) == num_threads - 1:
        state[ARRIVED] = 0
        state[TASKS] = 0
        _announce(state, PHASE)
    else:
        _wait_while(state, PHASE, phase)


@inner
def _announce(state: Array, word: int) -> None:
    _add(state, word, 1)
    if _load(state, SLEEPING) > 0:
        _wake(_address(state) + 8 * word)


@inner
def _wait_while(state: Array, word: int, value: int) -> None:
    for _ in range(_SPINS):
        if _load(state, word) != value:
            return
        _pause()
    for _ in range(_YIELDS):
        if _load(state, word) != value:
            return
        _sched_yield()
    while _load(state, word) == value:
        # Whoever changes the word looks at SLEEPING afterwards, and the system looks at the word before it lets us sleep.
        _add(state, SLEEPING, 1)
        _sleep_while(_address(state) + 8 * word, value)
        _add(state, SLEEPING, -1)


# ---- the operating system ----------------------------------------------------------------------------------------------

_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_FUTEX = {"x86_64": 202, "aarch64": 98}  #: the number of Linux's system call, by machine
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # those private to the process

if sys.platform == "linux" and _MACHINE in _FUTEX:
    _NUMBER = _FUTEX[_MACHINE]
    _syscall: Any = types.ExternalFunction("syscall", types.int64(*(types.int64,) * 7))

    @inner
    def _sleep_while(address: int, value: int) -> None:
        """Sleep until somebody wakes us, unless the word (its lower half, as Linux compares it) has changed already."""
        _syscall(_NUMBER, address, _FUTEX_WAIT, value & 0xFFFFFFFF, 0, 0, 0)

    @inner
    def _wake(address: int) -> None:
        _syscall(_NUMBER, address, _FUTEX_WAKE, 1 << 30, 0, 0, 0)

else:
    _usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))

    @inner
    def _sleep_while(address: int, value: int) -> None:
        _usleep(np.uint32(50))

    @inner
    def _wake(address: int) -> None:
        pass


# ---- instructions ------------------------------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic  # type: ignore[untyped-decorator]
def _add(context: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to a word, and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _load(context: Any, array: Any, index: Any) -> Any:
    """A word as it is now."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature.args[0], args[0], args[1]), "seq_cst", 8)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _address(context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _WORD)

    return types.int64(array), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, entry: Any, thread: Any, num_threads: Any, tasks: Any) -> Any:
    """Call the code of a program's entry (code, words), given by address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        entry = builder.inttoptr(args[0], _WORD.as_pointer())
        code, words = (builder.load(builder.gep(entry, [ir.Constant(_WORD, i)])) for i in (0, 1))
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(code, kind.as_pointer()), [words, *args[1:]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(context: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _MACHINE == "x86_64":
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), _PAUSE)
            builder.call(builder.module.globals[_PAUSE], [])
        return context.get_dummy_value()

    return types.void(), generate
