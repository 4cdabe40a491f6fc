"""Group quantisation of weights: what the int8 and int4 kinds mean, whatever layout an implementation keeps them in.

A row is cut into groups of GROUP_SIZE inputs, the last one padded with zeros, and each group has its own float32 scale
(and minimum). Letters: n rows, K inputs, G = ceil(K / GROUP_SIZE) groups.
"""

from __future__ import annotations

import numpy as np

from .ops import GROUP_SIZE, Array, PackedWeight

_INT8_MAX = 127
_INT4_MAX = 15


def num_groups(num_inputs: int) -> int:
    """Groups of a row of ``num_inputs``."""
    return -(-num_inputs // GROUP_SIZE)


def quantize_int8(rows: Array) -> tuple[Array, Array]:
    """Codes int8 [n, G, GROUP_SIZE] and scales float32 [n, G] of ``rows`` float32 [n, K]: w ~ code * scale, symmetric.

    Raises ValueError where a weight is not finite.
    """
    groups = _groups(rows)
    scale = _finite(np.abs(groups).max(axis=-1) / np.float32(_INT8_MAX))
    codes = np.rint(groups / _divisor(scale)).clip(-_INT8_MAX, _INT8_MAX).astype(np.int8)
    return codes, scale


def quantize_int4(rows: Array) -> tuple[Array, Array, Array]:
    """Codes uint8 [n, G, GROUP_SIZE] in 0..15, scales and minima float32 [n, G]: w ~ code * scale + minimum.

    The padding of the last group is left out of its range. Raises ValueError where a weight is not finite.
    """
    groups = _groups(rows)
    used = np.arange(groups.shape[1] * GROUP_SIZE).reshape(groups.shape[1:]) < rows.shape[1]
    minimum = _finite(np.where(used, groups, np.inf).min(axis=-1))
    scale = _finite((np.where(used, groups, -np.inf).max(axis=-1) - minimum) / np.float32(_INT4_MAX))
    codes = np.rint((groups - minimum[..., None]) / _divisor(scale)).clip(0, _INT4_MAX).astype(np.uint8)
    return codes, scale, minimum


def dequantize_int8(codes: Array, scale: Array) -> Array:
    """float32 [n, G, GROUP_SIZE] from the result of :func:`quantize_int8`."""
    return codes.astype(np.float32) * scale[..., None]


def dequantize_int4(codes: Array, scale: Array, minimum: Array) -> Array:
    """float32 [n, G, GROUP_SIZE] from the result of :func:`quantize_int4`."""
    return codes.astype(np.float32) * scale[..., None] + minimum[..., None]


def ungroup(groups: Array, num_inputs: int) -> Array:
    """Groups [n, G, GROUP_SIZE] as rows [n, K], without the padding."""
    return groups.reshape(len(groups), groups.shape[1] * GROUP_SIZE)[:, :num_inputs]


def check_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """Raise ValueError unless ``rows`` [n, K] fit ``weight`` (N, K) at ``start``."""
    num_rows, num_inputs = weight.shape
    if rows.ndim != 2 or rows.shape[1] != num_inputs or not 0 <= start <= num_rows - len(rows):
        raise ValueError(f"rows of shape {rows.shape} at start={start} do not fit a weight of shape {weight.shape}")


def _groups(rows: Array) -> Array:
    """[n, K] -> [n, G, GROUP_SIZE], padded with zeros."""
    num_rows, num_inputs = rows.shape
    groups = num_groups(num_inputs)
    if groups * GROUP_SIZE != num_inputs:
        rows = np.pad(rows, ((0, 0), (0, groups * GROUP_SIZE - num_inputs)))
    return rows.reshape(num_rows, groups, GROUP_SIZE)


def _divisor(scale: Array) -> Array:
    """What to divide a group by: 1 where all its weights are equal and every code is 0."""
    return np.where(scale > 0, scale, np.float32(1))[..., None]


def _finite(values: Array) -> Array:
    if not np.all(np.isfinite(values)):
        raise ValueError("a weight that is NaN or infinite cannot be quantised; allowed: finite weights")
    return values
