"""What the threads of a team run: the calls of a program, one after the other, each cut into pieces that threads claim.

Nobody waits for a thread that is not there: one that lost its core, or has not woken up yet, finds the work done by others and
goes on from where they are. Only a piece that it has begun is waited for, for a moment by looking again and again, and then
asleep: an idle team costs nothing, and a busy machine slows it down and does not stall it. (sched_yield would: where Linux
schedules by deadlines, since 6.6, each call moves the thread's own a time slice further away.)

A late thread may still be in a job that the others have finished, while they have filled the rows of calls anew. So a claim
names the job: it succeeds only in a row of that job, which cannot be filled anew before the claimed piece is done.
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

#: Bytes of a team's state, each word in a cache line of its own: the number of the job, how many threads sleep, the address
#: and the number of its rows, and whether the threads are to end.
_JOB, _SLEEPING, _ROWS, _NUM_ROWS, _STOPPING = range(0, 320, 64)
#: Bytes of a row, which is a cache line: what to call, with which words, in how many pieces; the job and the next piece that
#: nobody has claimed (in the upper and the lower half of a word); and how many pieces are done.
_CODE, _WORDS, _PIECES, _NEXT, _DONE = range(0, 40, 8)
_ROW = 64

_SPINS = 2000
_CLOSED = 0xFFFFFFFF  #: a next piece that no row has
_WORD = ir.IntType(64)
_MACHINE = platform.machine()
_PAUSE = "llvm.x86.sse2.pause"


def work(state: Array, share: Share) -> None:
    """The life of a thread of the team: it takes part in jobs until it is told to end."""
    base = _address(state)
    job = 0
    while True:
        _wait_for_job(base, job)
        job = _load(base + _JOB)
        if _load(base + _STOPPING):
            return
        _take_part(base, job, share[2])


def lead(state: Array, rows: Array, calls: Array, share: Share) -> None:
    """Thread 0 runs a program [n, 3] of (code, words, pieces) with the others; returns when all is done.

    ``rows`` [>= n, 8] belong to the team. They may be replaced by more, but not freed: late threads look at them.
    """
    if share[1] == 1:
        for i in range(len(calls)):
            for piece in range(calls[i, 2]):
                _call(calls[i, 0], calls[i, 1], piece, calls[i, 2], 0)
        return
    base, first = _address(state), _address(rows)
    job = _load(base + _JOB) + 1
    for i in range(len(calls)):
        row = first + i * _ROW
        _store(row + _NEXT, (job << 32) | _CLOSED)
        _store(row + _CODE, calls[i, 0])
        _store(row + _WORDS, calls[i, 1])
        _store(row + _PIECES, calls[i, 2])
        _store(row + _DONE, 0)
        _store(row + _NEXT, job << 32)
    _store(base + _ROWS, first)
    _store(base + _NUM_ROWS, len(calls))
    _store(base + _JOB, job)
    if _load(base + _SLEEPING) > 0:
        _wake(base + _JOB)
    _take_part(base, job, 0)


def stop(state: Array, share: Share) -> None:
    """Let the other threads end."""
    base = _address(state)
    _store(base + _STOPPING, 1)
    _add(base + _JOB, 1)
    _wake(base + _JOB)


@inner
def _take_part(base: int, job: int, thread: int) -> None:
    first = _load(base + _ROWS)
    for i in range(_load(base + _NUM_ROWS)):
        row = first + i * _ROW
        piece = _claim(row, job)
        while piece >= 0:
            pieces = _load(row + _PIECES)
            _call(_load(row + _CODE), _load(row + _WORDS), piece, pieces, thread)
            if _add(row + _DONE, 1) + 1 == pieces and _load(base + _SLEEPING) > 0:
                _wake(row + _DONE)
            piece = _claim(row, job)
        if not _wait_for_others(base, row, job):
            return


@inner
def _claim(row: int, job: int) -> int:
    """A piece of a row that nobody else does; -1 where there is none left, or the row is another job's by now."""
    while True:
        word = _load(row + _NEXT)
        piece: int = word & 0xFFFFFFFF
        if word >> 32 != job or piece >= _load(row + _PIECES):
            return -1
        if _replace(row + _NEXT, word, word + 1):
            return piece


@inner
def _wait_for_others(base: int, row: int, job: int) -> bool:
    """Wait until all pieces of a row are done; False where the job is over."""
    for _ in range(_SPINS):
        if _load(row + _DONE) == _load(row + _PIECES):
            return True
        if _load(row + _NEXT) >> 32 != job:
            return False
        _pause()
    while True:
        done = _load(row + _DONE)
        if done == _load(row + _PIECES):
            return True
        if _load(row + _NEXT) >> 32 != job:
            return False
        # Whoever changes the word looks at SLEEPING afterwards, and the system looks at the word before it lets us sleep.
        _add(base + _SLEEPING, 1)
        _sleep_while(row + _DONE, done)
        _add(base + _SLEEPING, -1)


@inner
def _wait_for_job(base: int, last: int) -> None:
    for _ in range(_SPINS):
        if _load(base + _JOB) != last:
            return
        _pause()
    while _load(base + _JOB) == last:
        _add(base + _SLEEPING, 1)
        _sleep_while(base + _JOB, last)
        _add(base + _SLEEPING, -1)


# ---- the operating system ----------------------------------------------------------------------------------------------

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


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def _load(context: Any, address: Any) -> Any:
    """The word at an address as it is now."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(context: Any, address: Any, value: Any) -> Any:
    """Write a word, for all threads to see."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add(context: Any, address: Any, value: Any) -> Any:
    """Add to a word, and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _replace(context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a word if it still is what is expected; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _address(context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _WORD)

    return types.int64(array), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, code: Any, words: Any, piece: Any, num_pieces: Any, thread: Any) -> Any:
    """Call the code at an address with the words at another, for one piece of its work."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(context: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _MACHINE == "x86_64":
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), _PAUSE)
            builder.call(builder.module.globals[_PAUSE], [])
        return context.get_dummy_value()

    return types.void(), generate
