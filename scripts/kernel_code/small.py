"""Norms, ops on single elements, and copies of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minipage.kernels.cuda import blocks, elementwise, norm
from minipage.kernels.cuda.target import THREADS, WARP, blocks_for

from .specimens import F32, FLOATS, IDS, ROWS, SLOTS, U32, Launch, Specimen, array

HIDDEN, GATES = 4096, 14336  #: sizes of the layers of an 8B model
LAYERS, BLOCK = 32, 16 * 8 * 128  #: and elements of a block of 16 tokens
MOST_THREADS = norm.MOST_WARPS * WARP


def specimens() -> Iterator[Specimen]:
    """Each kernel, with wide accesses and without; plain copies for each kind of pages."""
    for access in ("wide", "plain"):
        yield from _rows(access)
    yield _copy("copy_blocks wide", blocks.copy_wide_kernel, U32, BLOCK // 8, 2)
    for kind, dtype in FLOATS.items():
        yield _copy(f"copy_blocks {kind}", blocks.copy_plain_kernel, dtype, BLOCK, dtype.bitwidth // 8)


def _copy(name: str, kernel: Any, dtype: Any, accesses: int, size: int) -> Specimen:
    """A copy of one block in each layer, K and V, in so many accesses, of elements of ``size`` bytes."""
    pool = array(dtype, 3)
    grid = LAYERS * blocks_for(accesses, blocks.ELEMENTS * THREADS)
    launch = Launch("a block of 16 x 8 x 128 in 32 layers", grid, 2 * 2 * LAYERS * BLOCK * size)
    return Specimen(name, kernel, (*[pool] * 4, SLOTS, SLOTS), THREADS, launch, wide_loads=dtype == U32)


def _rows(access: str) -> Iterator[Specimen]:
    """Kernels over rows, by one of two accesses."""
    is_wide = access == "wide"

    def each(name: str, arrays: int, blocks: int, size: int) -> Launch:
        return Launch(name, blocks, 4 * arrays * size)

    row = "1 row of 4096"
    norms = (
        ("rms_norm", norm.rms_norm_kernels, 3, 3),
        ("add_rms_norm", norm.add_rms_norm_kernels, 4, 5),
        ("layer_norm", norm.layer_norm_kernels, 4, 4),
    )
    for name, kernels, num_rows, moved in norms:
        signature = (*[ROWS] * num_rows, F32)
        launch = each(row, moved, 1, HIDDEN)
        yield Specimen(f"{name} {access}", kernels[access], signature, MOST_THREADS, launch, is_wide)
    others = (
        ("add", elementwise.add_kernels, (ROWS, ROWS, ROWS), 3),
        ("gather_rows", elementwise.gather_rows_kernels, (ROWS, ROWS, IDS), 2),
    )
    for name, kernels, signature, moved in others:
        launch = each(row, moved, HIDDEN // (4 * THREADS), HIDDEN)
        yield Specimen(f"{name} {access}", kernels[access], signature, THREADS, launch, is_wide)
    for activation, kernels in elementwise.gated_activation_kernels.items():
        launch = each("1 row of 14336", 3, GATES // (4 * THREADS), GATES)
        name = f"gated_activation {activation} {access}"
        yield Specimen(name, kernels[access], (ROWS, ROWS), THREADS, launch, is_wide)
