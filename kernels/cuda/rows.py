"""Four neighbouring elements of a row at once: by one 16-byte access where rows allow it, else one by one.

``load(array, row, first)`` gives four float32 of an array [T, H], ``store(array, row, first, four)`` writes them. ``first`` is a
multiple of 4 below H; what lies behind the end of a row is read as 0 and not written. Kernels are made for either access,
with the same arithmetic in the same order, and :func:`choose` takes the one that suits the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy import float32

from .intrinsics import load_floats, store_floats
from .target import address, pure_function

Array = Any
Kernels = dict[str, Any]  #: a kernel for each of :data:`ACCESSES`


class Access(NamedTuple):
    """How four elements are reached."""

    load: Any
    store: Any


@pure_function
def _load_wide(array: Array, row: Any, first: Any) -> Any:
    return load_floats(array, row * array.shape[1] + first)


@pure_function
def _store_wide(array: Array, row: Any, first: Any, four: Any) -> None:
    store_floats(array, row * array.shape[1] + first, four)


@pure_function
def _element(array: Array, row: Any, i: Any) -> Any:
    return array[row, i] if i < array.shape[1] else float32(0)


@pure_function
def _load_plain(array: Array, row: Any, i: Any) -> Any:
    return (
        _element(array, row, i),
        _element(array, row, i + 1),
        _element(array, row, i + 2),
        _element(array, row, i + 3),
    )


@pure_function
def _store_plain(array: Array, row: Any, i: Any, four: Any) -> None:
    size = array.shape[1]
    a, b, c, d = four
    array[row, i] = a
    if i + 1 < size:
        array[row, i + 1] = b
    if i + 2 < size:
        array[row, i + 2] = c
    if i + 3 < size:
        array[row, i + 3] = d


ACCESSES = {"wide": Access(_load_wide, _store_wide), "plain": Access(_load_plain, _store_plain)}


def for_each_access(make: Callable[[Any, Any], Any]) -> Kernels:
    """The kernels that ``make(load, store)`` gives."""
    return {name: make(*access) for name, access in ACCESSES.items()}


def choose(kernels: Kernels, *arrays: Array) -> Any:
    """The kernel for arrays that it reaches by whole rows, [T, H] each."""
    return kernels["wide" if all(map(_is_wide, arrays)) else "plain"]


def _is_wide(array: Array) -> bool:
    """Whether each row begins at a multiple of 16 bytes and ends at one."""
    return array.shape[1] % 4 == 0 and bool(array.flags.c_contiguous) and address(array) % 16 == 0
