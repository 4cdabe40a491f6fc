"""Headers of GGUF files: read as the gguf package reads them, and refused where they are hostile."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import pytest
from helpers.gguf_files import CONFIG, TENSORS, write_gguf
from helpers.memory import holds, measure_peak

from minipage.errors import ModelLoadError
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.gguf_header import read_header


def test_the_package_reads_the_same_metadata(tmp_path: Path) -> None:
    """Our reading of the header agrees with the gguf package's on every key and every tensor's place."""
    values = {
        "a.bool": True,
        "a.text": "né",
        "a.list": ["x", "", "ü"],
        "a.ints": [1, -2],
        "a.floats": [0.5, 2.0],
        "a.neg": -1.5,
    }
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, metadata=values, matrix_type="F16")
    header, reader = read_header(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    places = {t.name: (t.tensor_type, tuple(int(d) for d in t.shape)[::-1], t.data_offset) for t in reader.tensors}
    assert {name: (info.type.number, *info[1:]) for name, info in header.tensors.items()} == places


def text(value: bytes | str) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    """A metadata pair of a raw value."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    """A tensor's entry."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def header(tensors: list[bytes], pairs: list[bytes], tail: bytes = bytes(64), version: int = 3, **counts: int) -> bytes:
    """A whole file; ``counts`` may lie about the number of tensors and pairs."""
    num_tensors, num_pairs = counts.get("num_tensors", len(tensors)), counts.get("num_pairs", len(pairs))
    start = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)
    return start + b"".join(pairs) + b"".join(tensors) + tail


ARCHITECTURE = pair("general.architecture", 8, text("llama"))
HUGE = 1 << 62

HOSTILE = {
    "empty": b"",
    "another format": b"PK\3\4" + bytes(64),
    "version 1": header([], [ARCHITECTURE], version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64),
    "cut in the counts": header([], [])[:12],
    "cut in the metadata": header([], [ARCHITECTURE], b"")[:-3],
    "cut in the tensors": header([tensor("a", [4])], [ARCHITECTURE], b"")[:-3],
    "cut in the data": header([tensor("a", [64])], [ARCHITECTURE], bytes(64)),
    "endless tensors": header([], [ARCHITECTURE], num_tensors=HUGE),
    "endless pairs": header([], [ARCHITECTURE], num_pairs=HUGE),
    "endless string": header([], [text("k") + struct.pack("<IQ", 8, HUGE)]),
    "endless numbers": header([], [pair("k", 9, struct.pack("<IQ", 4, HUGE))]),
    "endless bytes": header([], [pair("k", 9, struct.pack("<IQ", 0, (1 << 64) - 1))]),
    "endless strings": header([], [pair("k", 9, struct.pack("<IQ", 8, HUGE))]),
    "array of arrays": header([], [pair("k", 9, struct.pack("<IQ", 9, 1) * 40)]),
    "unknown value type": header([], [pair("k", 99, bytes(8))]),
    "unknown element type": header([], [pair("k", 9, struct.pack("<IQ", 99, 1))]),
    "bad UTF-8": header([], [pair("k", 8, text(b"\xff\xfe"))]),
    "duplicate key": header([], [ARCHITECTURE, ARCHITECTURE]),
    "duplicate tensor": header([tensor("a", [4]), tensor("a", [4])], [ARCHITECTURE]),
    "unknown tensor type": header([tensor("a", [4], kind=77)], [ARCHITECTURE]),
    "removed tensor type": header([tensor("a", [4], kind=4)], [ARCHITECTURE]),
    "no dims": header([tensor("a", [])], [ARCHITECTURE]),
    "endless dims": header([tensor("a", [4], num_dims=1 << 31)], [ARCHITECTURE]),
    "shape overflow": header([tensor("a", [1 << 33, 1 << 33])], [ARCHITECTURE]),
    "offset beyond the file": header([tensor("a", [4], offset=HUGE)], [ARCHITECTURE]),
    "rows of half a block": header([tensor("a", [16], kind=2)], [ARCHITECTURE]),
    "alignment 0": header([], [ARCHITECTURE, pair("general.alignment", 4, struct.pack("<I", 0))]),
    "alignment 3": header([], [ARCHITECTURE, pair("general.alignment", 4, struct.pack("<I", 3))]),
    "alignment as text": header([], [ARCHITECTURE, pair("general.alignment", 8, text("32"))]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str, tmp_path: Path) -> None:
    """A bad header is a ModelLoadError that names the file, at once, with no memory taken and nothing left open."""
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name])
    started = time.perf_counter()
    with measure_peak() as peak, pytest.raises(ModelLoadError, match=r"model\.gguf: not a valid GGUF file: ") as caught:
        open_checkpoint(str(path))
    assert time.perf_counter() - started < 1
    assert peak.nbytes < 20e6
    assert caught.tb is not None  # whose frames would keep an open file alive
    assert not holds(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """A file that ends anywhere before its last tensor is a ModelLoadError, never another error or a wrong model."""
    whole = write_gguf(tmp_path / "whole.gguf", CONFIG, TENSORS).read_bytes()
    path = tmp_path / "model.gguf"
    for length in [*range(0, 1500, 7), *range(1500, len(whole) - 64, 4099)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            open_checkpoint(str(path))
