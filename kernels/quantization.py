"""Group quantisation of weights: what the quantised kinds mean, whatever layout an implementation keeps them in.

A row is cut into groups of GROUP_SIZE inputs, and each group has a float16 scale (and minimum):

    int8              w = code * scale              code -127..127 (files may hold -128), as in GGUF's Q8_0
    int4              w = code * scale + minimum    code 0..15, as in Q4_1
    int4_symmetric    w = (code - 8) * scale        code 0..15, as in Q4_0; the scale may be negative

in float32. A code times a float16 has at most 19 significant bits, so the products are exact: only the sum is rounded.

Letters: n rows, K inputs, G = ceil(K / GROUP_SIZE) groups. The codes behind a row's last input mean nothing.
"""

from __future__ import annotations

import numpy as np

from .dtypes import STORAGE
from .group_fit import fit, fit_symmetric
from .ops import GROUP_SIZE, WEIGHT_KINDS, Array, Groups, PackedWeight

GROUP_KINDS = tuple(kind for kind in WEIGHT_KINDS if kind not in STORAGE)  #: the quantised ones among WEIGHT_KINDS
INT8_MAX = 127
INT4_MAX = 15
INT4_ZERO = 8  #: the code that stands for 0 in the kind int4_symmetric
_GROUPS_AT_ONCE = 2048  #: that are quantised together: few enough for a cache, and many beside the cost of a call


def code_dtype(kind: str) -> np.dtype:
    """NumPy dtype of the codes of a quantised kind."""
    return np.dtype(np.int8 if kind == "int8" else np.uint8)


def num_groups(num_inputs: int) -> int:
    """Groups of a row of ``num_inputs``."""
    return -(-num_inputs // GROUP_SIZE)


# ---- from numbers and back -----------------------------------------------------------------------------------------


def quantize(rows: Array, kind: str, importance: Array | None = None) -> Groups:
    """``rows`` float32 [n, K] in the quantised ``kind``. Codes are the nearest for the scale (and minimum) as rounded.

    int8 spreads its codes over the range of a group. The int4 kinds seek the grid with the smallest squared error, in which
    ``importance`` float32 [K] > 0 weighs the inputs (None: all alike); weights that lie on a grid already stay on it.

    Raises ValueError where a weight is not finite, or too large for a float16 scale or minimum.
    """
    num_rows, num_inputs = rows.shape
    groups = num_groups(num_inputs)
    weighing = np.zeros((groups, GROUP_SIZE), np.float32)  # the padding weighs nothing
    weighing.reshape(-1)[:num_inputs] = 1 if importance is None else importance
    step = max(1, _GROUPS_AT_ONCE // groups)
    parts = [
        _quantize(_grouped(rows[start : start + step]), kind, weighing) for start in range(0, max(1, num_rows), step)
    ]
    codes, scales, minima = zip(*parts, strict=True)
    return Groups(np.concatenate(codes), np.concatenate(scales), np.concatenate(minima) if kind == "int4" else None)


def _quantize(groups: Array, kind: str, importance: Array) -> Groups:
    """Weights [n, G, 32] quantised; ``importance`` [G, 32] is 0 for the padding."""
    if not np.all(np.isfinite(groups)):
        raise ValueError("a weight that is NaN or infinite cannot be quantised; allowed: finite weights")
    with np.errstate(over="ignore"):
        scales, minima = _spread(groups, kind)
    if not (np.all(np.isfinite(scales)) and (minima is None or np.all(np.isfinite(minima)))):
        largest = np.abs(groups).max()
        raise ValueError(f"a weight of magnitude {largest:.6g} is too large for {kind}; allowed: bfloat16, float32")
    found = Groups(_nearest_codes(groups, scales, minima, kind), scales, minima)
    if kind != "int8":
        _improve(found, groups, importance, kind)
    return found


def _improve(found: Groups, groups: Array, importance: Array, kind: str) -> None:
    """Replace those of ``found`` [n, G] that a search finds a better grid for, given their weights [n, G, 32]."""
    x = np.ascontiguousarray(groups.reshape(-1, GROUP_SIZE).T)
    weighing = np.tile(importance.T, len(groups))
    if kind == "int4":
        scales, minima = (part.reshape(found.scales.shape).astype(np.float16) for part in fit(x, weighing))
    else:
        scales, minima = fit_symmetric(x, weighing).reshape(found.scales.shape).astype(np.float16), None
    sought = Groups(_nearest_codes(groups, scales, minima, kind), scales, minima)
    better = _error(sought, groups, importance, kind) < _error(found, groups, importance, kind)
    for kept, new in zip(found, sought, strict=True):
        if kept is not None:
            kept[better] = new[better]


def _error(found: Groups, groups: Array, importance: Array, kind: str) -> Array:
    """The weighted squared error [n, G]."""
    error = dequantize(found, kind)
    error -= groups
    return np.einsum("ngi,ngi,gi->ng", error, error, importance)


def dequantize(groups: Groups, kind: str) -> Array:
    """float32 [n, G, GROUP_SIZE]: what ``groups`` of a quantised ``kind`` mean, to the bit."""
    codes = unpacked(groups, kind).codes.view(np.int8)
    if kind == "int4_symmetric":
        codes = codes - np.int8(INT4_ZERO)
    values = codes * groups.scales.astype(np.float32)[..., None]
    if groups.minima is not None:
        values += groups.minima.astype(np.float32)[..., None]
    return values


def unpacked(groups: Groups, kind: str) -> Groups:
    """The same with a byte for each code."""
    if kind == "int8" or groups.codes.shape[-1] == GROUP_SIZE:
        return groups
    codes = np.empty((*groups.codes.shape[:-1], GROUP_SIZE), np.uint8)
    np.bitwise_and(groups.codes, INT4_MAX, out=codes[..., : GROUP_SIZE // 2])
    np.right_shift(groups.codes, 4, out=codes[..., GROUP_SIZE // 2 :])
    return groups._replace(codes=codes)


def packed(groups: Groups, kind: str) -> Groups:
    """The same with two codes to a byte, where ``kind`` has codes of four bits."""
    if kind == "int8" or groups.codes.shape[-1] < GROUP_SIZE:
        return groups
    low, high = groups.codes[..., : GROUP_SIZE // 2], groups.codes[..., GROUP_SIZE // 2 :]
    return groups._replace(codes=low | high << np.uint8(4))


def ungroup(groups: Array, num_inputs: int) -> Array:
    """Groups [n, G, GROUP_SIZE] as rows [n, K], without the padding."""
    return groups.reshape(len(groups), groups.shape[1] * GROUP_SIZE)[:, :num_inputs]


def _grouped(rows: Array) -> Array:
    """[n, K] -> [n, G, GROUP_SIZE], padded with the last input, which adds nothing to the range of its group."""
    num_rows, num_inputs = rows.shape
    missing = num_groups(num_inputs) * GROUP_SIZE - num_inputs
    if missing:
        rows = np.pad(rows, ((0, 0), (0, missing)), mode="edge")
    return rows.reshape(num_rows, num_groups(num_inputs), GROUP_SIZE)


def _spread(groups: Array, kind: str) -> tuple[Array, Array | None]:
    """Scales and minima, float16 [n, G], that spread the codes over the range of each group."""
    if kind == "int4":
        low = groups.min(axis=-1)
        minima = low.astype(np.float16)
        # From below, so that codes, which are never negative, reach the smallest weight.
        minima = np.where(minima > low, np.nextafter(minima, np.float16(-np.inf)), minima)
        return _half_scales(groups.max(axis=-1) - minima.astype(np.float32), INT4_MAX), minima
    if kind == "int8":
        return _half_scales(np.abs(groups).max(axis=-1), INT8_MAX), None
    # The weight of largest magnitude gets code 0, -8 steps from zero: on its side there is one step more.
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = _half_scales(np.maximum(-low, high), INT4_ZERO)
    return np.where(high > -low, -scales, scales), None


def _half_scales(extents: Array, steps: int) -> Array:
    """Scales float16 at which ``steps`` codes cover ``extents`` float32 >= 0: to nearest, or the next larger float16 where the
    nearest, as it may among the smallest ones, would leave more than half a step uncovered."""
    scales = (extents / np.float32(steps)).astype(np.float16)
    short = extents > scales.astype(np.float32) * np.float32(steps + 0.5)
    return np.where(short, np.nextafter(scales, np.float16(np.inf)), scales)


def _nearest_codes(groups: Array, scales: Array, minima: Array | None, kind: str) -> Array:
    """The codes [n, G, GROUP_SIZE] nearest to the weights."""
    wide = scales.astype(np.float32)[..., None]
    if minima is not None:
        groups = groups - minima.astype(np.float32)[..., None]
    codes = groups / np.where(wide == 0, np.float32(1), wide)  # scale 0: all weights are equal to the minimum, or to 0
    np.rint(codes, out=codes)
    if kind == "int8":
        return codes.clip(-INT8_MAX, INT8_MAX).astype(np.int8)
    if kind == "int4_symmetric":
        codes += np.float32(INT4_ZERO)
    return codes.clip(0, INT4_MAX).astype(np.uint8)


# ---- checking ------------------------------------------------------------------------------------------------------


def check_rows(weight: PackedWeight, start: int, rows: Array) -> None:
    """Raise ValueError unless ``rows`` [n, K] fit ``weight`` (N, K) at ``start``."""
    num_rows, num_inputs = weight.shape
    if rows.ndim != 2 or rows.shape[1] != num_inputs or not 0 <= start <= num_rows - len(rows):
        raise ValueError(f"rows of shape {rows.shape} at start={start} do not fit a weight of shape {weight.shape}")


def check_groups(weight: PackedWeight, start: int, groups: Groups) -> None:
    """Raise ValueError unless ``groups`` of n rows fit the kind of ``weight``, and its shape (N, K) at ``start``."""
    kind, (num_rows, num_inputs) = weight.kind, weight.shape
    count = len(groups.codes)
    if kind not in GROUP_KINDS:
        raise ValueError(f"groups do not fit a weight of kind {kind}; allowed: {', '.join(GROUP_KINDS)}")
    per_group = (count, num_groups(num_inputs))
    codes_in_group = GROUP_SIZE
    if kind != "int8" and groups.codes.shape[-1:] == (GROUP_SIZE // 2,):
        codes_in_group //= 2  # two to a byte
    wanted = [((*per_group, codes_in_group), code_dtype(kind)), (per_group, np.dtype(np.float16))]
    if kind == "int4":
        wanted.append((per_group, np.dtype(np.float16)))
    found = [(part.shape, part.dtype) for part in groups if part is not None]
    if found != wanted or not 0 <= start <= num_rows - count:
        shapes = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in found)
        raise ValueError(
            f"groups of {shapes} at start={start} do not fit a weight of kind {kind} and shape {weight.shape}"
        )
