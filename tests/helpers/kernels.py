"""The harness for kernels: every implementation of the op set, run on the same numbers and compared.

Tests of an op, in ``tests/kernels``, are written once and run for every implementation here. The reference is compared with
float64 formulas, all others with the reference. To try an implementation of your own:

1. Write a module with the names of ``minipage.kernels.ops.Ops`` (its constants and one op are enough to begin with) and, if its
   arrays are not NumPy's, a ``minipage.device.Device`` that has them.
2. Add ``Implementation("mine", device)`` to :data:`IMPLEMENTATIONS` below.
3. ``pytest tests/kernels -k "paged_attention and mine"``

A failure says how large the largest error is, how large it may be, and where it is. Tests give each implementation the
shapes that it has time for: those of the full list, or for one that is simulated, the small list of :func:`cases`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from minipage.device import Device, open_device
from minipage.device.cuda import cuda_is_available
from minipage.kernels.dtypes import STORAGE, convert, to_float32
from minipage.kernels.ops import GROUP_SIZE, Groups, PackedWeight
from minipage.kernels.pages import PAGE_STORAGE
from minipage.kernels.quantization import GROUP_KINDS, code_dtype, num_groups

Array = Any


class Implementation:
    """An op set together with the device that its arrays live on."""

    def __init__(self, name: str, device: Device, *, simulated: bool = False) -> None:
        self.name = name
        self.device = device
        self.simulated = simulated  #: so slow that it gets small shapes only

    def __repr__(self) -> str:
        return self.name

    def array(self, host: Array) -> Array:
        """A copy of a host array on the device."""
        return self.device.array(np.array(host))

    def host(self, array: Array) -> Array:
        """A device array on the host."""
        return self.device.host(array)

    def run(self, op: str, *args: Any) -> None:
        """Run an op on device arrays."""
        with self.device.compute():
            getattr(self.device.ops, op)(*args)
        self.device.synchronize()

    def result(self, op: str, shape: tuple[int, ...], *args: Any) -> Array:
        """What an op writes to its first argument, ``out`` of this shape, given the others as host values."""
        out = self.array(np.full(shape, np.nan, np.float32))  # what is not written shows
        self.run(op, out, *(self.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args))
        return self.host(out)

    def weight(self, rows: Array, kind: str) -> PackedWeight:
        """Host rows [N, K] as a packed weight."""
        weight: PackedWeight = self.device.ops.empty_weight(rows.shape, kind, self.device.xp)
        self.device.ops.pack_rows(weight, 0, rows)
        return weight

    def key_pages(self, plain: Array, kind: str) -> Array:
        """float32 keys [nb, KVH, B, D] as a key cache in a storage."""
        if kind == "int8":
            return self.array(int8_keys(plain))
        return self._pages(plain, kind, self.device.ops.KEY_AXES)

    def value_pages(self, plain: Array, kind: str) -> Array:
        """float32 values [nb, KVH, B, D] as a value cache in a storage."""
        if kind == "int8":
            return self.array(int8_values(plain))
        return self._pages(plain, kind, self.device.ops.VALUE_AXES)

    def _pages(self, plain: Array, kind: str, axes: tuple[int, ...]) -> Array:
        return self.array(np.ascontiguousarray(store(plain, kind).transpose(axes)))

    def plain_keys(self, pages: Array) -> Array:
        """A key cache, back as stored on the host in the plain layout [nb, KVH, B, D], or D + 4 in int8."""
        return self.host(pages).transpose(np.argsort(self.device.ops.KEY_AXES))

    def plain_values(self, pages: Array) -> Array:
        """A value cache, back as stored on the host in the plain layout [nb, KVH, B, D], or D + 4 in int8."""
        return self.host(pages).transpose(np.argsort(self.device.ops.VALUE_AXES))


REFERENCE = Implementation("reference", open_device("reference"))
CPU = Implementation("cpu", open_device("cpu"))


def _cuda() -> list[Implementation]:
    """CUDA on a GPU, or simulated, or not at all, as this machine allows."""
    if cuda_is_available():
        return [Implementation("cuda", open_device("cuda"))]
    if all(importlib.util.find_spec(package) for package in ("numba_cuda", "greenlet")):
        return [Implementation("cuda-sim", open_device("cuda-sim"), simulated=True)]
    return []


IMPLEMENTATIONS = [REFERENCE, CPU, *_cuda()]


def cases(full: Sequence[Any], small: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test with arguments ``impl`` and ``case`` for every implementation and each of its cases.

    Cases with a ``kind`` of pages are for the implementations that have such pages.
    """
    pairs = [
        (impl, case)
        for impl in IMPLEMENTATIONS
        for case in (small if impl.simulated else full)
        if getattr(case, "kind", "float32") in impl.device.ops.PAGE_KINDS
    ]
    return pytest.mark.parametrize(("impl", "case"), [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in pairs])


#: Run a test with the argument ``impl`` for every implementation.
each_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS, ids=repr)


def compare(
    impl: Implementation, compute: Callable[[Implementation], Array], formula: Callable[[], Array], tolerance: float
) -> None:
    """``compute`` with ``impl`` gives what it gives with the reference; and with the reference, what the formula gives."""
    expected = formula() if impl is REFERENCE else compute(REFERENCE)
    assert_close(compute(impl), expected, tolerance)


def assert_close(actual: Array, expected: Array, tolerance: float) -> None:
    """Equal up to ``tolerance`` times the largest expected magnitude (at least 1), NaN and infinities in the same places."""
    assert actual.shape == expected.shape
    with np.errstate(invalid="ignore"):
        difference = np.abs(actual.astype(np.float64) - expected)
    # Equal infinities, and NaN where NaN is expected, are right; one alone is as wrong as can be.
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    error = np.where(same, 0.0, np.nan_to_num(difference, nan=np.inf))
    finite = np.abs(expected[np.isfinite(expected)])
    allowed = tolerance * max(1.0, finite.max(initial=0.0))
    if np.any(error > allowed):
        worst = np.unravel_index(np.argmax(error), error.shape)
        place = ", ".join(map(str, worst))
        raise AssertionError(
            f"max error {error[worst]:.3g} (allowed {allowed:.3g}) at [{place}]: {actual[worst]} instead of "
            f"{expected[worst]}; {np.count_nonzero(error > allowed)} of {error.size} elements are wrong"
        )


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Equal bit for bit, NaN included."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    different = np.ascontiguousarray(actual).view(bits) != np.ascontiguousarray(expected).view(bits)
    if different.any():
        first = np.unravel_index(np.argmax(different), different.shape)
        place = ", ".join(map(str, first))
        raise AssertionError(
            f"{np.count_nonzero(different)} of {different.size} elements differ in their bits, the first at [{place}]: "
            f"{actual[first]!r} instead of {expected[first]!r}"
        )


def normal(seed: int, *shape: int) -> Array:
    """Normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def any_groups(seed: int, num_rows: int, num_inputs: int, kind: str) -> Groups:
    """Quantised rows of random codes, all that there are, and scales of both signs, the smallest float16 among them."""
    rng = np.random.default_rng(seed)
    shape = num_rows, num_groups(num_inputs)
    low, high = (-128, 128) if kind == "int8" else (0, 16)
    codes = rng.integers(low, high, (*shape, GROUP_SIZE)).astype(code_dtype(kind))
    scales = rng.standard_normal(shape).astype(np.float16)
    scales[-1, -1] = 6e-8
    minima = rng.standard_normal(shape).astype(np.float16) if kind == "int4" else None
    return Groups(codes, scales, minima)


def seen_inputs(impl: Implementation, x: Array, kind: str) -> Array:
    """x [T, K] float32 as a linear layer of this kind sees it: the CPU quantises it too where the weights are quantised.

    Symmetric in groups of 32, to int16 for int8 weights and to int8 for the int4 kinds.
    """
    if impl is not CPU or kind not in GROUP_KINDS:
        return x
    limit = np.float32(32767 if kind == "int8" else 127)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP_SIZE))).reshape(len(x), -1, GROUP_SIZE)
    largest = np.abs(padded).max(axis=-1, keepdims=True)
    codes = np.rint(padded * (limit / np.maximum(largest, np.float32(1e-30))))
    return (codes * (largest / limit)).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float32)


def store(x: Array, kind: str) -> Array:
    """float32 in a storage; what is too large for float16 becomes infinite."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16) if kind == "float16" else convert(x, kind)


def rounded(x: Array, kind: str) -> Array:
    """float32 as it comes back from a storage; in int8 the last axis has a scale."""
    if kind == "int8":
        codes, scales = int8_codes(x)
        return codes * scales[..., None]
    return to_float32(store(x, kind))


def int8_codes(x: Array) -> tuple[Array, Array]:
    """x [..., D] float32 as codes [..., D] int8 and scales [...] float32; what is not finite has a scale of NaN and any codes."""
    limit, largest = np.float32(127), np.abs(x).max(axis=-1)
    is_zero, is_bad = largest <= np.float32(1e-30), ~np.isfinite(largest)
    scales, codes = largest / limit, np.zeros(x.shape, np.int8)
    scales[is_zero], scales[is_bad], codes[is_bad] = 0, np.nan, 85
    good = ~(is_zero | is_bad)
    codes[good] = np.rint(x[good] * (limit / largest[good])[..., None])
    return codes, scales


def int8_keys(plain: Array) -> Array:
    """Blocks [nb, KVH, D + 4, B] of int8: the codes of keys [nb, KVH, B, D], dim by dim, and then their scales."""
    codes, scales = int8_codes(plain)
    (num_blocks, heads, size, dim), first = plain.shape, plain.shape[:2]
    parts = codes.swapaxes(2, 3).reshape(*first, dim * size), np.ascontiguousarray(scales).view(np.int8)
    return np.concatenate(parts, axis=-1).reshape(num_blocks, heads, dim + 4, size)


def int8_values(plain: Array) -> Array:
    """Blocks [nb, KVH, B, D + 4] of int8: the codes of values [nb, KVH, B, D], each token's with its scale."""
    codes, scales = int8_codes(plain)
    return np.concatenate([codes, scales[..., None].view(np.int8)], axis=-1)


STORAGES = tuple(STORAGE)
PAGE_KINDS = tuple(PAGE_STORAGE)
