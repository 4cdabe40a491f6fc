"""Norms over the hidden size. The sums are float64: scalar code either way, and then their order is no matter."""

from __future__ import annotations

import numpy as np
from numba import prange

from ..ops import Array
from .jit import INPUT_VECTOR, Kernel, inner

_SERIAL = 1 << 14  #: elements below which starting the threads takes longer than the work


def rms_norm(out: Array, x: Array, weight: Array, eps: float) -> None:
    """Root mean square norm (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + eps) * weight."""
    _rms_norm_kernel(out, x, weight, eps)


def layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
    """Layer norm (Ba et al. 2016): out = (x - mean) / sqrt(var + eps) * weight + bias."""
    _layer_norm_kernel(out, x, weight, bias, eps)


def _rms_norm(out: Array, x: Array, weight: Array, eps: float) -> None:
    if x.size < _SERIAL:
        for t in range(len(x)):
            _rms_norm_row(out[t], x[t], weight, eps)
    else:
        for t in prange(len(x)):
            _rms_norm_row(out[t], x[t], weight, eps)


@inner
def _rms_norm_row(out: Array, x: Array, weight: Array, eps: float) -> None:
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i]) * np.float64(x[i])
    scale = np.float32(1 / np.sqrt(total / len(x) + eps))
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


def _layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
    for t in range(len(x)):
        mean = 0.0
        for i in range(x.shape[1]):
            mean += x[t, i]
        mean /= x.shape[1]
        variance = 0.0
        for i in range(x.shape[1]):
            variance += (x[t, i] - mean) ** 2
        scale = 1 / np.sqrt(variance / x.shape[1] + eps)
        for i in range(x.shape[1]):
            out[t, i] = np.float32((x[t, i] - mean) * scale) * weight[i] + bias[i]


_rms_norm_kernel = Kernel(_rms_norm, f"float32[:, ::1], float32[:, ::1], {INPUT_VECTOR}, float64", parallel=True)
_layer_norm_kernel = Kernel(_layer_norm, f"float32[:, ::1], float32[:, ::1], {INPUT_VECTOR}, {INPUT_VECTOR}, float64")
