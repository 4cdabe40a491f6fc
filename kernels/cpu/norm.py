"""Norms over the hidden size. The sums are float64, in one fixed order."""

from __future__ import annotations

from ..ops import Array
from .kernel import Kernel
from .team import call

_MATRIX, _VECTOR = "float32[:, ::1]", "float32[::1]"
_RMS_NORM = Kernel("norm:rms_norm", f"{_MATRIX}, {_MATRIX}, {_VECTOR}, float64")
_ADD_RMS_NORM = Kernel("norm:add_rms_norm", f"{_MATRIX}, {_MATRIX}, {_MATRIX}, {_VECTOR}, float64")
_LAYER_NORM = Kernel("norm:layer_norm", f"{_MATRIX}, {_MATRIX}, {_VECTOR}, {_VECTOR}, float64")


def rms_norm(out: Array, x: Array, weight: Array, eps: float) -> None:
    """Root mean square norm (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + eps) * weight."""
    call(_RMS_NORM, out, x, weight, eps, units=len(x))


def add_rms_norm(out: Array, h: Array, x: Array, weight: Array, eps: float) -> None:
    """The residual of a layer and the norm of the next one: h += x, and then out = rms_norm(h)."""
    call(_ADD_RMS_NORM, out, h, x, weight, eps, units=len(x))


def layer_norm(out: Array, x: Array, weight: Array, bias: Array, eps: float) -> None:
    """Layer norm (Ba et al. 2016): out = (x - mean) / sqrt(var + eps) * weight + bias."""
    call(_LAYER_NORM, out, x, weight, bias, eps, units=len(x))
