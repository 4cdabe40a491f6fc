"""Reading from files that nobody vouches for: bounded, and with errors that name the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError

CHARACTERS_SHOWN = 80  #: of a value, in a message
MAX_JSON_BYTES = 100_000_000  #: the most that a safetensors header may have, too


def shorten(value: object) -> str:
    """repr of a value from a file, cut to CHARACTERS_SHOWN."""
    text = repr(value)
    return text if len(text) <= CHARACTERS_SHOWN else text[: CHARACTERS_SHOWN - 3] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: found {size} bytes of JSON; allowed: up to {MAX_JSON_BYTES}")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: found {shorten(content)}; wanted a JSON object")
    return content


class DataFile:
    """A regular file, held open and read by ranges into fresh arrays.

    Plain reads rather than a memory map: a map's pages count as the process's memory, and a file that shrinks under a
    map ends the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ModelLoadError(f"{path}: wanted a regular file")
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (held until close)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """``count`` elements of ``dtype`` from byte ``offset`` on. Several threads may read at once."""
        array = np.empty(count, dtype)
        free = array.view(np.uint8).data
        while len(free):
            taken = os.preadv(self._file.fileno(), [free], offset)
            if not taken:
                raise ModelLoadError(
                    f"{self.path}: found {array.nbytes - len(free)} bytes at offset {offset - array.nbytes + len(free)}, "
                    f"wanted {array.nbytes}; the file became shorter while it was read"
                )
            free, offset = free[taken:], offset + taken
        return array

    def close(self) -> None:
        self._file.close()
