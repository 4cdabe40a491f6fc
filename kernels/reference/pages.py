"""Tokens in pages: written and read in any storage; see :mod:`minipage.kernels.pages` and :class:`minipage.kernels.ops.Ops`."""

from __future__ import annotations

import numpy as np

from ..dtypes import float32_to_bfloat16, to_float32
from ..ops import Array
from ..pages import SCALE_BYTES


def write_token(key_cache: Array, value_cache: Array, slot: int, k: Array, v: Array) -> None:
    """Write k and v [KVH, D] of a token to a slot."""
    block, offset = divmod(slot, value_cache.shape[2])
    if key_cache.dtype == np.int8:
        key_cache[block, :, :-SCALE_BYTES, offset], _key_scales(key_cache)[block, :, offset] = _quantize(k)
        value_cache[block, :, offset, :-SCALE_BYTES], _value_scales(value_cache)[block, :, offset] = _quantize(v)
    else:
        key_cache[block, :, :, offset] = _narrow(k, key_cache.dtype)
        value_cache[block, :, offset, :] = _narrow(v, value_cache.dtype)


def read_tokens(key_cache: Array, value_cache: Array, blocks: Array, offsets: Array) -> tuple[Array, Array]:
    """K and V [n, KVH, D] of the tokens at ``offsets`` [n] of ``blocks`` [n]: what the pages mean, exactly."""
    if key_cache.dtype == np.int8:
        keys = key_cache[blocks, :, :-SCALE_BYTES, offsets], _key_scales(key_cache)[blocks, :, offsets]
        values = value_cache[blocks, :, offsets, :-SCALE_BYTES], _value_scales(value_cache)[blocks, :, offsets]
        return _dequantize(*keys), _dequantize(*values)
    return to_float32(key_cache[blocks, :, :, offsets]), to_float32(value_cache[blocks, :, offsets, :])


def _key_scales(pages: Array) -> Array:
    """The scales [nb, KVH, B] float32 in int8 keys [nb, KVH, D + 4, B], a view: the last four rows of a block together."""
    num_blocks, kv_heads, rows, block_size = pages.shape
    blocks = pages.reshape(num_blocks, kv_heads, rows * block_size)
    return blocks[..., (rows - SCALE_BYTES) * block_size :].view(np.float32)


def _value_scales(pages: Array) -> Array:
    """The scales [nb, KVH, B] float32 in int8 values [nb, KVH, B, D + 4], a view: the end of each token's row."""
    return pages[..., -SCALE_BYTES:].view(np.float32)[..., 0]


def _quantize(x: Array) -> tuple[Array, Array]:
    """x [KVH, D] float32 as codes [KVH, D] int8 and scales [KVH] float32."""
    largest = np.abs(x).max(axis=-1)
    scales = np.where(np.isfinite(largest), largest, np.float32(np.nan))
    scales[largest <= np.float32(1e-30)] = 0
    inverse = np.divide(np.float32(127), scales, out=np.zeros_like(scales), where=scales > 0)
    with np.errstate(invalid="ignore"):  # an infinity times 0; codes with a scale of NaN say nothing
        codes = np.nan_to_num(np.rint(x * inverse[:, None])).astype(np.int8)
    return codes, scales / np.float32(127)


def _dequantize(codes: Array, scales: Array) -> Array:
    return codes * scales[..., None].astype(np.float64)


def _narrow(x: Array, dtype: np.dtype) -> Array:
    """float32 in a storage of floats, to nearest; what is too large for float16 becomes infinite."""
    if dtype == np.uint16:
        return float32_to_bfloat16(x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)
