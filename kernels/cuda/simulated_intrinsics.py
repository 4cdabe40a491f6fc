"""What :mod:`.intrinsics` says, in Numba's simulator: on NumPy arrays, with the checks that a GPU does not make."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent
from numpy.lib.array_utils import byte_bounds

from ..dtypes import float32_to_bfloat16
from .simulator import ALL_LANES, WARP, meet_in_warp

Array = Any
Words = tuple[Any, ...]


def _memory(array: Array, offset: Any) -> Any:
    """The 16 bytes at an offset as four words; IndexError or ValueError where a GPU would read others or trap."""
    address = array.ctypes.data + int(offset) * array.itemsize
    first, stop = byte_bounds(array)
    if address < first or address + 16 > stop:
        raise IndexError(f"16 bytes at element {offset} are not within an array of shape {array.shape}")
    if address % 16:
        raise ValueError(f"element {offset} of an array of {array.dtype} does not lie at a multiple of 16 bytes")
    return (ctypes.c_uint32 * 4).from_address(address)


def load16(array: Array, offset: Any) -> Words:
    return tuple(np.uint32(word) for word in _memory(array, offset))


def stream16(array: Array, offset: Any) -> Words:
    return load16(array, offset)


def store16(array: Array, offset: Any, words: Words) -> None:
    _memory(array, offset)[:] = [int(word) for word in words]


def element_at(array: Array, offset: Any) -> Any:
    if not 0 <= offset < array.size:
        raise IndexError(f"element {offset} is not within an array of shape {array.shape}")
    return array.reshape(-1)[offset]


def unpack_half(word: Any) -> tuple[Any, Any]:
    low, high = np.array([word], np.uint32).view(np.float16).astype(np.float32)
    return low, high


def unpack_bfloat16(word: Any) -> tuple[Any, Any]:
    low, high = np.array([int(word) << 16 & ALL_LANES, int(word) & 0xFFFF0000], np.uint32).view(np.float32)
    return low, high


def pack_half(low: Any, high: Any) -> Any:
    return np.array([low, high], np.float32).astype(np.float16).view(np.uint32)[0]


def pack_bfloat16(low: Any, high: Any) -> Any:
    return float32_to_bfloat16(np.array([low, high], np.float32)).view(np.uint32)[0]


def float_bits(x: Any) -> Any:
    return np.float32(x).view(np.uint32)


def bits_float(word: Any) -> Any:
    return np.uint32(word).view(np.float32)


def permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    source = (int(b) << 32 | int(a)).to_bytes(8, "little")
    return np.uint32(int.from_bytes((source[int(selector) >> 4 * i & 7] for i in range(4)), "little"))


def multiply_add(x: Any, y: Any, z: Any) -> Any:
    return np.float32(np.float64(x) * np.float64(y) + np.float64(z))


def multiply(x: Any, y: Any) -> Any:
    return np.float32(x) * np.float32(y)


def exp2(x: Any) -> Any:
    return np.exp2(np.float32(x))


def hidden(n: int) -> int:
    return n


def mma_half(c: Words, a: Words, b: Words) -> Words:
    return _mma("mma_half", _halves, c, a, b)


def mma_bfloat16(c: Words, a: Words, b: Words) -> Words:
    return _mma("mma_bfloat16", _bfloat16s, c, a, b)


def _halves(words: np.ndarray) -> np.ndarray:
    return words.view(np.float16).astype(np.float32)


def _bfloat16s(words: np.ndarray) -> np.ndarray:
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _mma(operation: str, floats: Callable[[np.ndarray], np.ndarray], c: Words, a: Words, b: Words) -> Words:
    """The first lane to go on puts the fragments of all together and multiplies; each takes what is its own."""
    lanes = meet_in_warp(operation, ALL_LANES, (a, b), depth=3)
    if "product" not in lanes:
        left, right = (floats(np.array([lanes[i][k] for i in range(WARP)], np.uint32)) for k in range(2))
        # [g, p, word (row half + 2 * column half), 2] and [g, p, word (row half), 2]
        rows = left.reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
        columns = right.reshape(8, 4, 2, 2).transpose(2, 1, 3, 0).reshape(16, 8)
        # Each element by itself, in the order of k: a BLAS may sum the rows of a matrix differently.
        lanes["product"] = (rows[:, :, None] * columns).sum(axis=1)
    group, pair = divmod(getcurrent().lane, 4)
    own = lanes["product"][group::8, 2 * pair : 2 * pair + 2].reshape(4)
    return tuple(np.float32(x) for x in np.array(c, np.float32) + own)


def load_matrices(array: Array, offset: Any) -> Words:
    matrices = _matrices("load_matrices", array, offset)
    group, pair = divmod(getcurrent().lane, 4)
    return tuple(m[group, 2 * pair : 2 * pair + 2].copy().view(np.uint32)[0] for m in matrices)


def load_matrices_transposed(array: Array, offset: Any) -> Words:
    matrices = _matrices("load_matrices_transposed", array, offset)
    group, pair = divmod(getcurrent().lane, 4)
    return tuple(m[2 * pair : 2 * pair + 2, group].copy().view(np.uint32)[0] for m in matrices)


def _matrices(operation: str, array: Array, offset: Any) -> np.ndarray:
    """Four matrices [4, 8, 8] of 16-bit elements, of which each lane brings a row."""
    rows = meet_in_warp(operation, ALL_LANES, load16(array, offset), depth=3)
    return np.array([rows[lane] for lane in range(WARP)], np.uint32).view(np.uint16).reshape(4, 8, 8)
