"""Norms, ops on single elements, and copies of blocks."""

from __future__ import annotations

from collections.abc import Iterator

from minipage.kernels.cuda import blocks, elementwise, norm
from minipage.kernels.cuda.target import THREADS

from .specimens import F32, FLOATS, IDS, ROWS, SLOTS, VECTOR, Specimen, array


def specimens() -> Iterator[Specimen]:
    """Each kernel, copies for each kind of pages."""
    yield Specimen("rms_norm", norm.rms_norm_kernel, (ROWS, ROWS, VECTOR, F32), THREADS)
    yield Specimen("add_rms_norm", norm.add_rms_norm_kernel, (ROWS, ROWS, ROWS, VECTOR, F32), THREADS)
    yield Specimen("layer_norm", norm.layer_norm_kernel, (ROWS, ROWS, VECTOR, VECTOR, F32), THREADS)
    yield Specimen("add", elementwise.add_kernel, (ROWS, ROWS, ROWS), THREADS)
    yield Specimen("gather_rows", elementwise.gather_rows_kernel, (ROWS, ROWS, IDS), THREADS)
    for activation, kernel in elementwise.gated_activation_kernels.items():
        yield Specimen(f"gated_activation {activation}", kernel, (ROWS, ROWS), THREADS)
    for kind, dtype in FLOATS.items():
        pool = array(dtype, 3)
        yield Specimen(f"copy_blocks {kind}", blocks.copy_blocks_kernel, (pool, pool, SLOTS, SLOTS), THREADS)
        yield Specimen(f"swap_blocks {kind}", blocks.swap_blocks_kernel, (pool, pool, SLOTS, SLOTS), THREADS)
