"""Safetensors files and indexes: what is good is read bit for bit, what is hostile is refused at once, naming the file."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.memory import holds, measure_peak
from helpers.models import bfloat16_bits, write_safetensors

from minipage.errors import ModelLoadError
from minipage.weights.safetensors import INDEX, SINGLE, SafetensorsSource, open_safetensors


def encode(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header (an object, or raw bytes), with a true length in front, or the one given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32", **more: Any) -> dict[str, Any]:
    """A tensor's entry in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def open_bytes(folder: Path, content: bytes) -> SafetensorsSource:
    """Open a folder whose only weights are these bytes."""
    (folder / SINGLE).write_bytes(content)
    return open_safetensors(folder)


EIGHT = bytes(8)
A = {"a": entry([2], 0, 8)}

HOSTILE = {
    "empty file": b"",
    "short length": b"\x08\0\0",
    "length 2^63": encode(A, EIGHT, length=1 << 63),
    "length over the limit": encode(A, EIGHT, length=10**8 + 1),
    "length beyond the file": encode(A, EIGHT, length=4096),
    "not JSON": encode(b"hello, world", EIGHT),
    "not UTF-8": encode(b'{"\xff": 1}', EIGHT),
    "a list": encode([A], EIGHT),
    "a float size": encode({"a": entry([2.0], 0, 8)}, EIGHT),
    "a bool size": encode({"a": entry([True], 0, 4)}, EIGHT[:4]),
    "a float offset": encode({"a": entry([2], 0, 8.0)}, EIGHT),
    "a negative offset": encode({"a": entry([2], -8, 0)}, EIGHT),
    "a negative size": encode({"a": entry([-2], 0, 8)}, EIGHT),
    "nested 5,000 deep": encode(b'{"a":' * 5000 + b"1" + b"}" * 5000, EIGHT),
    "overlap": encode({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
    "the same bytes twice": encode({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, EIGHT),
    "a hole": encode({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "trailing bytes": encode(A, bytes(9)),
    "short body": encode(A, bytes(7)),
    "begin after end": encode({"a": entry([2], 8, 0)}, EIGHT),
    "shape larger than its bytes": encode({"a": entry([1000, 1000], 0, 8)}, EIGHT),
    "shape product overflow": encode({"a": entry([1 << 33, 1 << 33], 0, 8)}, EIGHT),
    "size beyond 64 bits": encode({"a": entry([1 << 70], 0, 8)}, EIGHT),
    "duplicate tensor": encode(b'{"a":%b,"a":%b}' % ((json.dumps(A["a"]).encode(),) * 2), EIGHT),
    "duplicate tensor elsewhere": encode(
        b'{"a":%b,"a":%b}' % (json.dumps(A["a"]).encode(), json.dumps(entry([2], 8, 16)).encode()), bytes(16)
    ),
    "duplicate key in an entry": encode(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', EIGHT),
    "unknown dtype": encode({"a": entry([2], 0, 8, "F33")}, EIGHT),
    "missing offsets": encode({"a": {"dtype": "F32", "shape": [2]}}, EIGHT),
    "metadata that is no string": encode({"__metadata__": {"format": 1}, **A}, EIGHT),
    "metadata that is a tensor": encode({"__metadata__": [1], **A}, EIGHT),
}

GOOD = {
    "plain": encode(A, EIGHT),
    "unordered": encode({"b": entry([1], 8, 12), "a": entry([2], 0, 8)}, bytes(12)),
    "no elements": encode({"a": entry([2], 0, 8), "b": entry([0, 4], 8, 8)}, EIGHT),
    "a scalar": encode({"a": entry([], 0, 4)}, EIGHT[:4]),
    "empty metadata": encode({"__metadata__": {}, **A}, EIGHT),
    "padded with spaces": encode(json.dumps(A).encode() + b" " * 40, EIGHT),
    "unaligned": encode(json.dumps(A).encode() + b" " * (3 - len(json.dumps(A)) % 8), EIGHT),
    "an unknown field": encode({"a": entry([2], 0, 8, note={"by": ["nobody"]})}, EIGHT),
    "a dtype that cannot be loaded": encode({"a": entry([1], 0, 8, "I64")}, EIGHT),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    """A bad file is a ModelLoadError that names it, at once, with no memory taken and nothing left open."""
    started = time.perf_counter()
    with measure_peak() as peak, pytest.raises(ModelLoadError, match=SINGLE) as caught:
        open_bytes(tmp_path, HOSTILE[name])
    assert time.perf_counter() - started < 1
    assert peak.nbytes < 20e6
    assert caught.tb is not None  # whose frames would keep an open file alive
    assert not holds(tmp_path / SINGLE)


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_read(name: str, tmp_path: Path) -> None:
    """What the format allows is accepted; once closed, the file is neither open nor mapped."""
    source = open_bytes(tmp_path, GOOD[name])
    assert "a" in source.names()
    source.close()
    assert not holds(tmp_path / SINGLE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_read_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Any range of rows of any tensor has the bits that were written, in the storage dtype."""
    rng = np.random.default_rng(0)
    tensors = {"m": rng.normal(size=(7, 5)), "v": rng.normal(size=9), "t": rng.normal(size=(3, 2, 4))}
    write_safetensors(tmp_path / SINGLE, {k: v.astype(np.float32) for k, v in tensors.items()}, dtype)
    source = open_safetensors(tmp_path)
    for name, tensor in tensors.items():
        stored = bfloat16_bits(tensor) if dtype == "bfloat16" else tensor.astype(np.float32).astype(dtype)
        assert source.shape(name) == tensor.shape
        for start, stop in ((0, None), (0, 1), (2, 3), (1, len(tensor)), (2, 2)):
            rows = source.read(name, start, stop)
            assert rows.dtype == stored.dtype
            np.testing.assert_array_equal(rows, stored[start:stop])
    assert source.dtype("m") == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    assert source.file("m") == str(tmp_path / SINGLE)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """A file cut short after it was opened gives an error that names it, not wrong numbers or a dead process."""
    source = open_bytes(tmp_path, encode({"a": entry([1000], 0, 4000)}, bytes(4000)))
    with open(tmp_path / SINGLE, "r+b") as file:
        file.truncate(500)
    with pytest.raises(ModelLoadError, match=rf"{SINGLE}.*wanted 4000"):
        source.read("a")


# ---- the index -----------------------------------------------------------------------------------------------------


def write_index(folder: Path, placed: Any) -> None:
    """An index with this weight_map."""
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))


def test_index_rules(tmp_path: Path) -> None:
    """Only shards that the index names are opened, and a tensor comes from the shard where the index places it."""
    one, two = np.ones((2, 2), np.float32), np.full((2, 2), 2, np.float32)
    write_safetensors(tmp_path / "x-1.safetensors", {"a": one, "b": one})
    write_safetensors(tmp_path / "x-2.safetensors", {"b": two})
    write_safetensors(tmp_path / SINGLE, {"stray": one})
    (tmp_path / "broken.safetensors").write_bytes(b"junk")
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    source = open_safetensors(tmp_path)
    assert sorted(source.names()) == ["a", "b"]
    np.testing.assert_array_equal(source.read("b"), two)
    assert source.file("b") == str(tmp_path / "x-2.safetensors")
    source.close()


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({"a": "x-1.safetensors", "b": "x-3.safetensors"}, r"x-3\.safetensors"),
        ({"a": "x-1.safetensors", "z": "x-1.safetensors"}, "tensor z is missing"),
        ({"a": "../x-1.safetensors"}, "tensor 'a' is placed in '../x-1.safetensors'"),
        ({"a": "/etc/x.safetensors"}, "tensor 'a' is placed in '/etc/x.safetensors'"),
        ({"a": "sub/x-1.safetensors"}, "tensor 'a' is placed in"),
        ({"a": "..\\x-1.safetensors"}, "tensor 'a' is placed in"),
        ({"a": "pytorch_model.bin"}, "tensor 'a' is placed in 'pytorch_model.bin'"),
        ({"a": 1}, "tensor 'a' is placed in 1"),
        ({}, "weight_map is {}"),
        (["a"], "weight_map is"),
        (None, "weight_map is None"),
    ],
)
def test_bad_indexes_are_refused(placed: Any, message: str, tmp_path: Path) -> None:
    """A missing shard, a tensor that its shard lacks, and every way out of the folder are errors; no shard stays open."""
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (folder, tmp_path):
        write_safetensors(place / "x-1.safetensors", {"a": np.ones((2, 2), np.float32)})
    write_index(folder, placed)
    with pytest.raises(ModelLoadError, match=message) as caught:
        open_safetensors(folder)
    assert caught.tb is not None
    assert not holds(folder / "x-1.safetensors")


def test_other_weight_files_are_named(tmp_path: Path) -> None:
    """A folder with nothing but pickles says what it found and what is allowed."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match=rf"only pytorch_model\.bin; allowed: {SINGLE}"):
        open_safetensors(tmp_path)
