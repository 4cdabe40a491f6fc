"""Drawing tokens."""

from __future__ import annotations

from collections.abc import Iterator

from minipage.kernels.cuda import sampling, selection

from .specimens import I32, ROWS, U32, Launch, Specimen, array

VOCABULARY = 128256  #: of an 8B model


def specimens() -> Iterator[Specimen]:
    """The sampler."""
    signature = array(I32, 1), ROWS, array(U32, 2), ROWS
    one_row = Launch("1 row of 128256", 1, 4 * VOCABULARY)
    yield Specimen("sample", sampling.sample_kernel, signature, selection.THREADS, one_row)
