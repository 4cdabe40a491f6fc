"""Acting at a chosen moment of what the engine does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_call(number: int, act: Callable[[], Any]) -> Iterator[list[int]]:
    """Does something when a function of minipage is called for the ``number``-th time; yields a list of that count."""
    count = [0]

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/minipage/" in frame.f_code.co_filename:
            count[0] += 1
            if count[0] == number:
                sys.setprofile(None)
                act()

    sys.setprofile(look)
    try:
        yield count
    finally:
        sys.setprofile(None)
