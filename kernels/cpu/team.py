"""Teams of threads that run kernels, and programs: the calls of a whole step, recorded once and run as one.

The threads are the engine's own. They start with the first program, sleep while there is none, and end with :meth:`Team.close`
or with the team. A process that was forked starts them anew.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..ops import Array
from .code import folder
from .kernel import JIT_IS_DISABLED, Kernel

_STATE_WORDS, _ROW_WORDS = 64, 8  #: of native/team.py
_ROWS_AT_FIRST = 1024
_PIECES = 4  #: of a kernel's work a thread: more than one, since a busy machine does not give all threads the same time
_WORK = Kernel("team:work", "int64[::1]")
_LEAD = Kernel("team:lead", "int64[::1], int64[:, ::1], int64[:, ::1]")
_STOP = Kernel("team:stop", "int64[::1]")
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

_local = threading.local()
_teams: weakref.WeakSet[Team] = weakref.WeakSet()


class Program:
    """Calls of kernels on given arrays, in order. The arrays must stay where they are; the program keeps them alive."""

    def __init__(self) -> None:
        self._calls: list[tuple[Kernel, tuple[Any, ...], list[int], int]] = []
        self._words: Array = np.zeros(0, np.int64)
        self._led: tuple[Array, Array, Callable[[], None]] | None = None

    def add(self, kernel: Kernel, args: tuple[Any, ...], pieces: int) -> None:
        """Append a call whose work is cut into ``pieces``. Raises TypeError for arrays that do not fit the kernel."""
        self._calls.append((kernel, args, kernel.words(args), pieces))

    def __len__(self) -> int:
        return len(self._calls)

    @functools.cached_property
    def table(self) -> Array:
        """int64 [n, 3]: of each call, the addresses of its code and of its words, and its pieces."""
        starts = itertools.accumulate((len(words) for _, _, words, _ in self._calls), initial=0)
        self._words = np.array([word for _, _, words, _ in self._calls for word in words], dtype=np.int64)
        base = self._words.ctypes.data
        calls = zip(self._calls, starts, strict=False)
        needed = {_WORK, _LEAD, _STOP, *(call[0] for call in self._calls)}
        if not all(kernel.is_loaded for kernel in needed):
            folder.announce(kernel.identity for kernel in needed)
        rows = [(kernel.address, base + 8 * start, pieces) for (kernel, _, _, pieces), start in calls]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def led_by(self, state: Array, rows: Array, num_threads: int) -> Callable[[], None]:
        """What runs the program on the team that has this state and these rows; kept, since Python takes a while to make it."""
        if self._led is None or self._led[0] is not state or self._led[1] is not rows:
            self._led = state, rows, _bound(_LEAD, (state, rows, self.table), 0, num_threads)
        return self._led[2]

    def run_in_python(self) -> None:
        """The same without compiled code."""
        from .native.share import Share

        for kernel, args, _, pieces in self._calls:
            for piece in range(pieces):
                kernel.function(*args, Share(piece, pieces, 0))


#: What :meth:`Team.record` makes: programs, and the Python functions that are to be called between them.
Recording = list[Program | Callable[[], None]]


class Team:
    """``num_threads`` threads, the calling one among them, that run programs together.

    ``with team:`` makes ops of this thread run on it, each at once; :meth:`record` collects them instead. One thread at a
    time may be inside; others wait.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._scratch = np.empty(0, np.uint8)
        self._recording: Recording | None = None
        self._outer: list[Team | None] = []
        self._finish: weakref.finalize[..., Team] | None = None
        self._begin()
        _teams.add(self)

    def _begin(self) -> None:
        if self._finish is not None:
            self._finish.detach()
        self._lock = threading.RLock()
        self._state = _aligned(_STATE_WORDS)
        self._rows, self._old_rows = _aligned(_ROWS_AT_FIRST * _ROW_WORDS).reshape(-1, _ROW_WORDS), list[Array]()
        self._finish = None

    def __enter__(self) -> Team:
        self._lock.acquire()
        self._outer.append(getattr(_local, "team", None))
        _local.team = self
        return self

    def __exit__(self, *exception: object) -> None:
        _local.team = self._outer.pop()
        self._lock.release()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Ops called inside are not run but become a program; where :meth:`call_python` is called, another one begins."""
        with self:
            self._recording = [Program()]
            try:
                yield self._recording
            finally:
                self._recording = None

    def call(self, kernel: Kernel, args: tuple[Any, ...], units: int) -> None:
        """Run a kernel, or add it to the program that is being recorded. Its work may be cut into ``units``."""
        most = _PIECES * self.num_threads if self.num_threads > 1 else 1
        recording: Recording = [Program()] if self._recording is None else self._recording
        program = recording[-1]
        assert isinstance(program, Program)
        program.add(kernel, args, max(1, min(units, most)))
        if self._recording is None:
            self.run(recording)

    def call_python(self, function: Callable[[], None]) -> None:
        """Call what is no kernel, now, or in its place each time that what is being recorded is run."""
        if self._recording is None:
            function()
        else:
            self._recording += [function, Program()]

    def run(self, recording: Recording) -> None:
        """Run what was recorded; returns when it is done."""
        with self._lock:
            for part in recording:
                if isinstance(part, Program):
                    self._run_program(part)
                else:
                    part()

    def _run_program(self, program: Program) -> None:
        if JIT_IS_DISABLED:
            program.run_in_python()
            return
        program.table  # noqa: B018  (before the threads start, so that it is said what is compiled for both)
        if self._finish is None:
            self._start()
        if len(program) > len(self._rows):
            self._old_rows.append(self._rows)  # threads that are late may still look there
            self._rows = _aligned(2 * len(program) * _ROW_WORDS).reshape(-1, _ROW_WORDS)
        program.led_by(self._state, self._rows, self.num_threads)()

    def scratch(self, *shapes: tuple[tuple[int, ...], Any]) -> list[Array]:
        """Uninitialised arrays of the given (shape, dtype), for ops to use until their last kernel has run."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes]
        *starts, total = itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
        if total > len(self._scratch):  # programs keep the one that they were recorded with
            self._scratch = _aligned(total // 8).view(np.uint8)
        return [
            self._scratch[start : start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=True)
        ]

    def close(self) -> None:
        """End the threads. The next program would start them again."""
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._begin()

    def _start(self) -> None:
        state, count = self._state, self.num_threads
        for kernel in (_WORK, _LEAD, _STOP):
            kernel.address  # noqa: B018  (compile here and not in the threads)
        threads = [
            threading.Thread(target=_bound(_WORK, (state,), index, count), name=f"minipage-{index}", daemon=True)
            for index in range(1, count)
        ]
        for thread in threads:
            thread.start()
        self._finish = weakref.finalize(self, _end, state, threads)


def call(kernel: Kernel, *args: Array | float, units: int) -> None:
    """Call a kernel on the current team: at once, or later if a program is being recorded.

    ``units`` is how many pieces its work may be cut into, each of which is worth a thread's while.
    """
    current().call(kernel, args, units)


def current() -> Team:
    """The team that ops of this thread run on: one of this thread alone, unless it is inside another."""
    team: Team | None = getattr(_local, "team", None)
    if team is None:
        if not hasattr(_local, "alone"):
            _local.alone = Team(1)
        team = _local.alone
    return team


def _end(state: Array, threads: list[threading.Thread]) -> None:
    _bound(_STOP, (state,), 0, 1)()
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()


def _bound(kernel: Kernel, args: tuple[Any, ...], thread: int, num_threads: int) -> Callable[[], None]:
    """A call of compiled code, to be made once or many times; other Python threads go on meanwhile."""
    words = kernel.words(args)
    return functools.partial(_ENTRY(kernel.address), (ctypes.c_int64 * len(words))(*words), 0, num_threads, thread)


def _aligned(num_words: int) -> Array:
    """Zeros int64 that begin at a cache line."""
    room = np.zeros(num_words + 8, np.int64)
    skip = -room.ctypes.data % 64 // 8
    return room[skip : skip + num_words]


def _after_fork() -> None:
    for team in list(_teams):
        team._begin()  # the threads, and whoever held the lock, stayed in the parent
    _local.__dict__.pop("team", None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
