"""A prefix cache in a file: what was computed once is warm after a restart.

One safetensors file. Its metadata say which engine it fits (``engine``: JSON) and the salts of its chains (``salts``: JSON,
"group/salt" each); ``digest`` is a SHA-256 over both and all tensors, in order of name:

    parents   int64 [N]         the node before each node, an earlier one; -1 - r: salt r, where a chain begins
    tokens    int32 [N, B]      of each node
    holders   int64 [n]         the nodes whose blocks are stored, heads of chains first
    key.j     [n, KVH, B, D]    layer j of each block's group; bfloat16 as its bits in uint16, int8 with its scales: D + 4
    value.j   [n, KVH, B, D]

Keys are not in it: they are made anew from the tokens. What K and V hold is believed, as a model's weights are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ..cache import BlockManager, Chains, PrefixCache
from ..device.base import Device
from ..device.kv_cache import KVCache
from ..errors import InvalidArgumentError
from ..kernels.pages import PAGE_STORAGE
from ..weights.files import shorten

FORMAT = 1
_SAFETENSORS = {"float32": "F32", "float16": "F16", "uint16": "U16", "int8": "I8"}


class PrefixStore:
    """Saves the published blocks of an engine, and loads those of an engine of the same model."""

    def __init__(
        self, device: Device, kv: KVCache, blocks: BlockManager, *, vocab_size: int, fingerprint: Callable[[], str]
    ) -> None:
        """``fingerprint`` tells the model; it is asked once, when it is needed."""
        self._device = device
        self._kv = kv
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._fingerprint: str | Callable[[], str] = fingerprint

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all published blocks to a file, replacing it at once and whole; returns how many there are.

        The host holds them all meanwhile. Raises InvalidArgumentError for a path that cannot be written, OSError where
        writing fails.
        """
        prefixes, file = self._prefixes(), _path(path)
        if file.is_dir() or not file.parent.is_dir():
            raise InvalidArgumentError(f"path={str(file)!r} is not allowed; it must name a file in an existing folder")
        chains, blocks = prefixes.chains()
        tensors: dict[str, np.ndarray] = {
            "parents": np.array(chains.parents, dtype=np.int64),
            "tokens": np.frombuffer(b"".join(chains.contents), dtype=np.int32).reshape(-1, self._blocks.block_size),
            "holders": np.array(chains.holders, dtype=np.int64),
        }
        with self._device.compute():
            for layer in range(self._kv.shape.num_layers):
                key, value = self._kv.read(layer, blocks)
                tensors[f"key.{layer}"] = np.ascontiguousarray(key)
                tensors[f"value.{layer}"] = np.ascontiguousarray(value)
        metadata = {"engine": json.dumps(self._engine()), "salts": json.dumps(chains.salts)}
        metadata["digest"] = _digest(metadata, tensors.__getitem__, tensors)
        _write(file, tensors, metadata)
        return len(blocks)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Publish the blocks of a file as far as there is room without evicting any; returns how many that were.

        Raises InvalidArgumentError, with nothing changed, where the file is of another model, block size, dtype or set of
        windows, or is not what :meth:`save` wrote.
        """
        prefixes, file = self._prefixes(), _path(path)
        if not file.is_file():
            raise InvalidArgumentError(f"path={str(file)!r} is not allowed; it must name a file that exists")
        engine = self._engine()
        with ExitStack() as stack:
            try:
                stored = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
                chains = self._read(stored, engine)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{file}: {error}") from error
            except Exception as error:  # the library's own, and what hostile numbers make of JSON and NumPy
                raise InvalidArgumentError(f"{file}: not a valid file of a prefix cache: {error!r}") from error
            with prefixes.restoring(chains) as pairs:
                self._fill(pairs, stored)
        return len(pairs)

    def _fill(self, pairs: Sequence[tuple[int, int]], stored: Any) -> None:
        """Write what the file has at index i into block b, for each pair (i, b)."""
        places, blocks = [i for i, _ in pairs], [block for _, block in pairs]
        with self._device.compute():
            for layer in range(self._kv.shape.num_layers if pairs else 0):
                key, value = (stored.get_tensor(f"{kind}.{layer}")[places] for kind in ("key", "value"))
                self._kv.write(layer, blocks, key, value)

    # ---- what is in a file -------------------------------------------------------------------------------------------
    def _engine(self) -> dict[str, Any]:
        """What must agree between the engine that saved a file and the one that loads it."""
        if not isinstance(self._fingerprint, str):
            with self._device.compute():
                self._fingerprint = self._fingerprint()
        shape = self._kv.shape
        return {
            "format": FORMAT,
            "model": self._fingerprint,
            "block_size": shape.block_size,
            "kv_cache_dtype": shape.dtype,
            "layers": shape.num_layers,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "groups": [list(group) for group in self._blocks.groups],
        }

    def _read(self, stored: Any, engine: dict[str, Any]) -> Chains:
        """The chains of an open file that fits this engine, once all of it is checked."""
        metadata = stored.metadata() or {}
        _compare(json.loads(metadata["engine"]), engine)
        slices = {name: stored.get_slice(name) for name in sorted(stored.keys())}
        layouts = {name: (each.get_shape(), each.get_dtype()) for name, each in slices.items()}
        num_nodes, num_stored = layouts["parents"][0][0], layouts["holders"][0][0]
        if layouts != self._layouts(num_nodes, num_stored):
            raise InvalidArgumentError(f"found the tensors {shorten(layouts)}, which do not belong together")
        if metadata["digest"] != _digest(metadata, stored.get_tensor, layouts):
            raise InvalidArgumentError("the contents do not match their digest; the file is damaged")
        parents, tokens, holders = (stored.get_tensor(name) for name in ("parents", "tokens", "holders"))
        salts = json.loads(metadata["salts"])
        if not isinstance(salts, list) or not all(isinstance(salt, str) for salt in salts):
            raise InvalidArgumentError(f"found the salts {shorten(salts)}; wanted a list of strings")
        _check_range("parents", parents, -len(salts), np.arange(num_nodes))
        _check_range("tokens", tokens, 0, self._vocab_size)
        _check_range("holders", holders, 0, num_nodes)
        return Chains(salts, parents.tolist(), [row.tobytes() for row in tokens], holders.tolist())

    def _layouts(self, num_nodes: int, num_stored: int) -> dict[str, tuple[list[int], str]]:
        """Shape and dtype of every tensor of a file with so many nodes and stored blocks."""
        shape = self._kv.shape
        dtype = _SAFETENSORS[PAGE_STORAGE[shape.dtype].name]
        kv = [num_stored, shape.num_kv_heads, shape.block_size, shape.page_dim], dtype
        return {
            "parents": ([num_nodes], "I64"),
            "tokens": ([num_nodes, shape.block_size], "I32"),
            "holders": ([num_stored], "I64"),
            **{f"{kind}.{layer}": kv for layer in range(shape.num_layers) for kind in ("key", "value")},
        }

    def _prefixes(self) -> PrefixCache:
        size = self._device.communicator.size
        if size > 1:
            raise InvalidArgumentError(
                f"tensor_parallel_size={size}: K and V are spread over the ranks, so the prefix cache can be neither saved nor "
                "loaded; allowed: 1"
            )
        if self._blocks.prefixes is None:
            raise InvalidArgumentError(
                "enable_prefix_caching=False: there is no prefix cache to save or to load into; allowed: True"
            )
        return self._blocks.prefixes


def _compare(found: Any, wanted: dict[str, Any]) -> None:
    """Raise InvalidArgumentError naming all in which the engine that saved differs from this one."""
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"was saved by {shorten(found)}; wanted the description of an engine")
    differences = [
        f"{name} is {shorten(found.get(name))} in the file and {shorten(value)} here"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differences:
        raise InvalidArgumentError(f"was saved by another model or engine: {'; '.join(differences)}")


def _check_range(name: str, values: np.ndarray, low: int, limit: int | np.ndarray) -> None:
    if not np.all((low <= values) & (values < limit)):
        raise InvalidArgumentError(f"{name} are out of range: found {shorten(values.tolist())}")


def _digest(metadata: Mapping[str, str], tensor: Callable[[str], np.ndarray], names: Iterable[str]) -> str:
    digest = hashlib.sha256(f"{metadata['engine']} {metadata['salts']}".encode())
    for name in sorted(names):
        digest.update(name.encode())
        digest.update(tensor(name).tobytes())
    return digest.hexdigest()


def _path(path: str | os.PathLike[str]) -> Path:
    allowed = "it must be a string or a Path"
    try:
        file = Path(path)
        allowed = "it must be the name of a file"
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # said where it matters
    except (TypeError, ValueError, OSError) as error:  # not a path, or one that no file can have
        raise InvalidArgumentError(f"path={shorten(path)} is not allowed; {allowed} ({error})") from error
    return file


def _write(file: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write beside the file and put it in its place, so that it is there whole or as it was."""
    unfinished = file.with_name(f".{os.urandom(16).hex()}.unfinished")
    try:
        safetensors.numpy.save_file(tensors, unfinished, metadata)
        os.replace(unfinished, file)
    except safetensors.SafetensorError as error:
        raise OSError(f"{file}: cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
