"""The header of a GGUF file (versions 2 and 3, little-endian), read without trusting a single count in it.

The gguf package's own reader makes several objects for each element of every array: seconds for a vocabulary, and memory
without end for a hostile count. Of it, rare types are used (:mod:`.gguf_types`), and dequantisation (:mod:`.gguf_blocks`).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..errors import ModelLoadError
from .files import shorten
from .gguf_strings import split_strings
from .gguf_types import TensorType, tensor_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_HEADER_BYTES = 64 << 20  #: several times what the largest vocabularies take
WINDOW_BYTES = 1 << 20  #: read at once where there are many strings
STRING_BYTES = 64  #: for a string in a window; most are shorter

#: Types of values, as files number them: numbers and truth values, by their NumPy dtypes, strings and arrays.
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """A tensor in a GGUF file."""

    type: TensorType
    shape: tuple[int, ...]  #: rows first, as in NumPy: the reverse of the file's order
    offset: int  #: of its first byte in the file


class Header(NamedTuple):
    """Everything before the tensors' data."""

    metadata: dict[str, Any]  #: str, int, float, bool, and lists of these
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """The header of a file; ModelLoadError where it is not a GGUF file or contradicts itself or its size."""
    try:
        with open(path, "rb") as file:
            return parse(Cursor(file, path.stat().st_size))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a valid GGUF file: {error}") from error


class Cursor:
    """Reads a file's header from front to back and never asks for more than the file has. A hostile count does no harm:
    everything counted takes at least a byte, so that reading stops where the file does."""

    def __init__(self, file: BinaryIO, file_size: int) -> None:
        self._file = file
        self.file_size = file_size
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes that may still belong to the header."""
        return min(self.file_size, MAX_HEADER_BYTES) - self.position

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count > self.left:
            raise ValueError(f"the header wants {count} bytes at offset {self.position}, but {self.left} are left")
        self.position += count
        return self._file.read(count)

    def uint(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def string(self) -> str:
        return self.take(self.uint(8)).decode()

    def strings(self, count: int) -> list[str]:
        """``count`` strings, a window of many at a time: a vocabulary and its merges are some hundred thousand."""
        texts: list[str] = []
        while len(texts) < count:
            missing = count - len(texts)
            window = self._file.read(min(WINDOW_BYTES, self.left, missing * STRING_BYTES))
            found, size = split_strings(window, missing)
            self.position += size
            self._file.seek(self.position)
            # None: the next one is longer than the window, or than the file, which is said there.
            texts += found or [self.string()]
        return texts

    def value(self) -> Any:
        """A metadata value: its type, then itself."""
        type = self.uint(4)
        if type == STRING:
            return self.string()
        if type != ARRAY:
            return self.scalars(self.dtype(type), 1)[0]
        element = self.uint(4)
        if element == STRING:
            return self.strings(self.uint(8))
        if element == ARRAY:
            raise ValueError(f"found an array of arrays at offset {self.position}; wanted numbers or strings in it")
        return self.scalars(self.dtype(element), self.uint(8))

    def dtype(self, type: int) -> np.dtype[Any]:
        """The dtype of a scalar type, which has just been read."""
        if type not in SCALARS:
            raise ValueError(
                f"found a value of type {type} at offset {self.position - 4}; allowed: 0 to {max(SCALARS)}"
            )
        return SCALARS[type]

    def scalars(self, dtype: np.dtype[Any], count: int) -> list[Any]:
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values


def parse(cursor: Cursor) -> Header:
    """Magic, version, counts, metadata, tensors, in the order of the file."""
    magic, version = cursor.take(4), cursor.uint(4)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, wanted {MAGIC!r}")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}; allowed: 2, 3, little-endian")
    num_tensors, num_pairs = cursor.uint(8), cursor.uint(8)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata key {shorten(key)} is there twice")
        metadata[key] = cursor.value()
    entries = [parse_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {shorten(alignment)}; allowed: a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    return Header(metadata, place_tensors(entries, data_start, cursor.file_size))


def parse_tensor(cursor: Cursor) -> tuple[str, TensorInfo]:
    """A tensor's name and entry; its offset counts from the start of the data, as in the file."""
    name, num_dims = cursor.string(), cursor.uint(4)
    if not 1 <= num_dims <= MAX_DIMS:
        raise ValueError(f"tensor {shorten(name)} has {num_dims} dims; allowed: 1 to {MAX_DIMS}")
    *dims, number, offset = struct.unpack(f"<{num_dims}QIQ", cursor.take(8 * num_dims + 12))
    return name, TensorInfo(tensor_type(number), tuple(reversed(dims)), offset)


def place_tensors(entries: list[tuple[str, TensorInfo]], data_start: int, file_size: int) -> dict[str, TensorInfo]:
    """The tensors with their offsets in the file, which must hold all of each."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in entries:
        if name in tensors:
            raise ValueError(f"tensor {shorten(name)} is there twice")
        if info.shape[-1] % info.type.block:
            raise ValueError(
                f"tensor {shorten(name)} has rows of {info.shape[-1]}; "
                f"wanted a multiple of {info.type.block} in {info.type.name}"
            )
        offset = data_start + info.offset
        end = offset + math.prod(info.shape[:-1]) * row_bytes(info)
        if end > file_size:
            raise ValueError(
                f"tensor {shorten(name)} of shape {list(info.shape)} ends at {end}, but the file at {file_size}"
            )
        tensors[name] = info._replace(offset=offset)
    return tensors


def row_bytes(info: TensorInfo) -> int:
    """Bytes of one row of the last dimension."""
    return info.shape[-1] // info.type.block * info.type.block_bytes
