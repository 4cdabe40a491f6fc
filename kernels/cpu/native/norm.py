"""Norms over the hidden size."""

from __future__ import annotations

import numpy as np

from ...ops import Array
from .share import Share, inner, part


def rms_norm(out: Array, x: Array, weight: Array, eps: float, share: Share) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    first, last = part(len(x), share)
    for t in range(first, last):
        _rms_norm_row(out[t], x[t], weight, eps)


def add_rms_norm(out: Array, h: Array, x: Array, weight: Array, eps: float, share: Share) -> None:
    """h += x, and then out = h / sqrt(mean(h^2) + eps) * weight."""
    first, last = part(len(x), share)
    for t in range(first, last):
        for i in range(x.shape[1]):
            h[t, i] += x[t, i]
        _rms_norm_row(out[t], h[t], weight, eps)


@inner
def _rms_norm_row(out: Array, x: Array, weight: Array, eps: float) -> None:
    scale = np.float32(1 / np.sqrt(_sum_of_squares(x) / len(x) + eps))
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@inner
def _sum_of_squares(x: Array) -> float:
    # float64 in eight sums side by side, which the compiler can keep in vectors.
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    whole = len(x) // 8 * 8
    for i in range(0, whole, 8):
        s0 += np.float64(x[i]) * np.float64(x[i])
        s1 += np.float64(x[i + 1]) * np.float64(x[i + 1])
        s2 += np.float64(x[i + 2]) * np.float64(x[i + 2])
        s3 += np.float64(x[i + 3]) * np.float64(x[i + 3])
        s4 += np.float64(x[i + 4]) * np.float64(x[i + 4])
        s5 += np.float64(x[i + 5]) * np.float64(x[i + 5])
        s6 += np.float64(x[i + 6]) * np.float64(x[i + 6])
        s7 += np.float64(x[i + 7]) * np.float64(x[i + 7])
    for i in range(whole, len(x)):
        s0 += np.float64(x[i]) * np.float64(x[i])
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


def layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float, share: Share) -> None:
    """out = (x - mean) / sqrt(var + eps) * weight + bias."""
    first, last = part(len(x), share)
    for t in range(first, last):
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
