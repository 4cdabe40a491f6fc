"""Linear layers and the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minipage.kernels.cuda.linear import embed_kernels, linear_kernels
from minipage.kernels.cuda.target import THREADS

from .specimens import F16, FLOATS, I8, I64, IDS, ROWS, U8, VECTOR, Launch, Specimen, array

#: What a weight of each kind is stored as.
CODES: dict[str, Any] = {**FLOATS, "int8": I8, "int4": U8, "int4_symmetric": U8}
SIZE = 4096  #: outputs and inputs of the layer that is reported


def packed(kind: str) -> tuple[Any, Any, Any]:
    """The types of codes, scales and minima; where a kind has none, its last array stands in."""
    codes, halves = array(CODES[kind], 2), array(F16, 2)
    return (codes, halves, halves) if kind.startswith("int") else (codes, codes, codes)


def weight_bytes(kind: str) -> int:
    """Bytes of a layer of SIZE times SIZE."""
    bits = {"int8": 8.5, "int4": 5, "int4_symmetric": 4.5}.get(kind) or CODES[kind].bitwidth
    return int(SIZE * SIZE * bits / 8)


def specimens() -> Iterator[Specimen]:
    """Each kernel for each kind of weights."""
    for kind in CODES:
        arrays = packed(kind)
        launch = Launch(f"1 row, {SIZE} x {SIZE}", SIZE // 32, weight_bytes(kind))
        kernel = linear_kernels[kind]
        yield Specimen(f"linear {kind}", kernel, (ROWS, ROWS, *arrays, VECTOR, I64), 256, launch=launch)
        yield Specimen(f"embed {kind}", embed_kernels[kind], (ROWS, *arrays, IDS), THREADS)
