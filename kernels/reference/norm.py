"""Norms over the hidden size, computed in float64."""

from __future__ import annotations

import numpy as np

from ..ops import Array


def rms_norm(out: Array, x: Array, weight: Array, eps: float) -> None:
    """Root mean square norm (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.astype(np.float64)
    out[:] = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight


def add_rms_norm(out: Array, h: Array, x: Array, weight: Array, eps: float) -> None:
    """h += x, and then out = rms_norm(h)."""
    h += x
    rms_norm(out, h, weight, eps)


def layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
    """Layer norm (Ba et al. 2016): out = (x - mean) / sqrt(var + eps) * weight + bias."""
    wide = x.astype(np.float64)
    centred = wide - np.mean(wide, axis=-1, keepdims=True)
    out[:] = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps) * weight + bias
