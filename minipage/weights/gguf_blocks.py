"""Quantised blocks of GGUF files as groups of 32: which weight kind a tensor of each type is kept in, and how it gets there.

    Q8_0 -> int8, Q5_0 -> int8, Q4_1 -> int4, Q4_0 -> int4_symmetric    the file's own codes and scales, bit for bit
    Q4_K -> int4            the file's codes; scales and minima, each a float16 times six bits, are rounded to float16
    all other types -> int8 dequantised and quantised again, to nearest

Layouts of the blocks: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..kernels.ops import GROUP_SIZE, Groups
from ..kernels.quantization import quantize
from .gguf_types import TensorType
from .source import Array

Bytes = npt.NDArray[np.uint8]

#: Types that are stored as one of the float kinds: the kind, and how NumPy reads them.
FLOATS = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}

Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
Q5_0 = np.dtype([("scale", "<f2"), ("high_bits", "u1", 4), ("nibbles", "u1", 16)])
Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("six_bits", "u1", (3, 4)), ("nibbles", "u1", (4, 32))])


def kind_of(type: TensorType) -> str:
    """The weight kind that keeps a tensor of this type and loses nothing, or least."""
    if type.name in FLOATS:
        return FLOATS[type.name][0]
    return KEPT_AS[type.name][0] if type.name in KEPT_AS else "int8"


def dequantized(stored: Bytes, type: TensorType) -> Array:
    """Rows of bytes [n, bytes] as rows of numbers [n, K]: bit for bit for the float types, else float32."""
    if type.name in FLOATS:
        return stored.view(FLOATS[type.name][1])
    import gguf  # takes a while

    values: Array = gguf.dequantize(stored, gguf.GGMLQuantizationType[type.name])
    return values


def groups_of(stored: Bytes, type: TensorType) -> Groups:
    """Rows of bytes [n, bytes] of a quantised type as groups of the kind that :func:`kind_of` names.

    Raises ValueError where values are quantised again and are not finite.
    """
    if type.name in KEPT_AS:
        return KEPT_AS[type.name][1](stored)
    return quantize(dequantized(stored, type), kind_of(type))


def _from_q8_0(stored: Bytes) -> Groups:
    blocks = stored.view(Q8_0)
    return Groups(blocks["codes"], blocks["scale"], None)


def _from_q5_0(stored: Bytes) -> Groups:
    """w = (code - 16) * scale, the fifth bit of code i being bit i of 32: codes that int8 has, too."""
    blocks = stored.view(Q5_0)
    fifth = np.unpackbits(blocks["high_bits"], axis=-1, bitorder="little")
    codes = (_split(blocks["nibbles"]) | fifth << np.uint8(4)).view(np.int8) - np.int8(16)
    return Groups(codes, blocks["scale"], None)


def _from_q4_0(stored: Bytes) -> Groups:
    blocks = stored.view(Q4_0)
    return Groups(blocks["nibbles"], blocks["scale"], None)


def _from_q4_1(stored: Bytes) -> Groups:
    blocks = stored.view(Q4_1)
    return Groups(blocks["nibbles"], blocks["scale"], blocks["minimum"])


def _from_q4_k(stored: Bytes) -> Groups:
    """w = code * (scale * s) - minimum * m for eight groups a block, s and m of six bits each."""
    blocks = stored.view(Q4_K)
    # Groups 0..3 have the low six bits of a byte; of groups 4..7, four bits are in the last four bytes, two at the top.
    first, second, last = (blocks["six_bits"][..., i, :] for i in range(3))
    s = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    m = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    scales = blocks["scale"].astype(np.float32)[..., None] * s
    minima = -(blocks["minimum"].astype(np.float32)[..., None] * m)
    rows, groups = len(stored), 8 * blocks.shape[1]
    codes = _split(blocks["nibbles"]).reshape(rows, groups, GROUP_SIZE)
    return Groups(codes, *(part.reshape(rows, groups).astype(np.float16) for part in (scales, minima)))


def _split(nibbles: Bytes) -> Bytes:
    """Codes [..., 2 n] from bytes [..., n]: all low halves, then all high ones."""
    width = nibbles.shape[-1]
    codes = np.empty((*nibbles.shape[:-1], 2 * width), np.uint8)
    np.bitwise_and(nibbles, 15, out=codes[..., :width])
    np.right_shift(nibbles, 4, out=codes[..., width:])
    return codes


#: Types whose codes are kept as they are: the weight kind, and what makes groups of rows of bytes.
KEPT_AS: dict[str, tuple[str, Callable[[Bytes], Groups]]] = {
    "Q8_0": ("int8", _from_q8_0),
    "Q5_0": ("int8", _from_q5_0),
    "Q4_1": ("int4", _from_q4_1),
    "Q4_0": ("int4_symmetric", _from_q4_0),
    "Q4_K": ("int4", _from_q4_k),
}
