"""Tensors of a Hugging Face folder: one ``model.safetensors``, or an index that names its shards.

A file is accepted if the safetensors library accepts it; what is read then is the header, which is plain JSON, because the
library's NumPy side has no bfloat16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from ..errors import ModelLoadError
from ..kernels.ops import Groups
from .files import DataFile, read_json, shorten
from .source import Array

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: The dtypes that can be loaded -> what NumPy reads them as; BF16 stays bits.
STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  #: of its first byte in the file


class Shard:
    """One safetensors file, validated, its header read, held open."""

    def __init__(self, path: Path) -> None:
        self.data = DataFile(path)
        try:
            self.entries = read_header(self.data)
        except BaseException:
            self.data.close()
            raise

    def read(self, name: str, start: int, stop: int | None) -> Array:
        """Rows start..stop of a tensor; a scalar is read whole, as one row."""
        dtype, shape, offset = self.entries[name]
        rows = range(shape[0] if shape else 1)[start:stop]
        row_size = math.prod(shape[1:])
        itemsize = int(STORED_AS[dtype][-1])
        array = self.data.read(offset + rows.start * row_size * itemsize, len(rows) * row_size, STORED_AS[dtype])
        return array.reshape(len(rows), *shape[1:])


class SafetensorsSource:
    """The tensors of a folder; a :class:`~.source.TensorSource`."""

    readable = tuple(STORED_AS)

    def __init__(self, path: Path, shards: Mapping[str, Shard]) -> None:
        self.path = str(path)
        self._shards = shards  # by tensor name

    def names(self) -> list[str]:
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards[name].entries[name].shape

    def dtype(self, name: str) -> str:
        return self._shards[name].entries[name].dtype

    def kind(self, name: str) -> None:
        """The config says in which dtype a folder's weights are meant to be."""

    def file(self, name: str) -> str:
        return str(self._shards[name].data.path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        return self._shards[name].read(name, start, stop)

    def read_groups(self, name: str, start: int = 0, stop: int | None = None) -> Groups:
        raise ModelLoadError(f"{self.file(name)}: tensor {name} has dtype {self.dtype(name)}, which is not quantised")

    def close(self) -> None:
        for shard in self._shards.values():
            shard.data.close()


def open_safetensors(folder: Path) -> SafetensorsSource:
    """Open the weights of a folder. The index rules where there is one, and only files that it names are opened."""
    if (folder / INDEX).exists():
        return open_indexed(folder)
    if not (folder / SINGLE).exists():
        present = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        )
        raise ModelLoadError(
            f"{folder}: found no weights that can be loaded, only {', '.join(present[:5]) or 'none at all'}; "
            f"allowed: {SINGLE}, or {INDEX} with the shards it names; a .gguf file is given by its own path"
        )
    shard = Shard(folder / SINGLE)
    return SafetensorsSource(folder, dict.fromkeys(shard.entries, shard))


def open_indexed(folder: Path) -> SafetensorsSource:
    """Open the shards that the index names; a tensor is taken from the shard where the index places it."""
    placed = read_index(folder / INDEX)
    shards: dict[str, Shard] = {}
    try:
        for name in sorted(set(placed.values())):
            shards[name] = Shard(folder / name)
        for tensor, name in placed.items():
            if tensor not in shards[name].entries:
                raise ModelLoadError(f"{folder / name}: tensor {tensor} is missing; {INDEX} places it in this file")
    except BaseException:
        for shard in shards.values():
            shard.data.close()
        raise
    return SafetensorsSource(folder, {tensor: shards[name] for tensor, name in placed.items()})


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name; every file must lie in the folder itself."""
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelLoadError(
            f"{path}: weight_map is {shorten(placed)}; wanted an object of tensor names and file names"
        )
    for tensor, name in placed.items():
        plain = isinstance(name, str) and name == Path(name).name and "\\" not in name and "\0" not in name
        if not plain or not name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: tensor {shorten(tensor)} is placed in {shorten(name)}; wanted the name of a .safetensors file "
                "in the same folder"
            )
    return placed


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different; the library takes the last of two, and no file needs two."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"duplicate key in {shorten([key for key, _ in pairs])}")
    return found


def read_header(data: DataFile) -> dict[str, Entry]:
    """The tensors of a file, once the safetensors library has checked that its header and its size agree."""
    try:
        with safetensors.safe_open(data.path, framework="numpy"):
            pass
        length = int(data.read(0, 1, "<u8")[0])
        header: dict[str, Any] = json.loads(data.read(8, length, "u1").tobytes(), object_pairs_hook=once)
    except Exception as error:  # the library's own error, OSError, and what a hostile number makes of Python's parser
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{data.path}: not a valid safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
