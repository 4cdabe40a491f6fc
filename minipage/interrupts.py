"""Ctrl-C where it must not tear what is being done: it comes as an exception between any two instructions of the main thread."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class CatchInterrupt:
    """Within the context Ctrl-C sets ``interrupted`` instead of raising, so that a step is never torn in the middle.

    A second Ctrl-C raises KeyboardInterrupt, for a step that takes too long to wait for. In other threads, where Ctrl-C raises
    nothing, and where somebody else has a handler for it, this does nothing.
    """

    interrupted = False

    def __enter__(self) -> CatchInterrupt:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_on = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_on:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_on:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True


class DelayInterrupt(CatchInterrupt):
    """The same, but that the KeyboardInterrupt is raised when the context ends."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self.interrupted:
            raise KeyboardInterrupt
