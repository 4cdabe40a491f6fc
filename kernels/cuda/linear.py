"""Linear layers: which kernel computes a call."""

from __future__ import annotations

from typing import Any

from ..ops import PackedWeight
from .linear_blas import linear_blas
from .linear_few import FEW, linear_few
from .linear_float32 import linear_float32
from .linear_many import linear_many
from .linear_parts import num_splits
from .target import SIMULATED, is_capturing
from .weights import arrays_of

Array = Any

BLAS_TOKENS = 256  #: beyond so many tokens arithmetic takes the time, and weights are read as often as it suits cuBLAS


def linear(out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
    """See :meth:`kernels.ops.Ops.linear`."""
    kind, tokens = weight.kind, x.shape[0]
    if tokens == 0:
        return
    if tokens > BLAS_TOKENS and not SIMULATED and not is_capturing():
        linear_blas(out, x, weight, bias)
    elif kind == "float32":
        linear_float32(out, x, weight.arrays[0], bias)
    else:
        own = linear_few if tokens <= FEW else linear_many
        own(out, x, arrays_of(weight), kind, num_splits(weight.shape), bias)
