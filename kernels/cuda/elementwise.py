"""Ops on single elements: a thread an element, the row by ``blockIdx.x`` and the column by ``blockIdx.y`` and the thread."""

from __future__ import annotations

import math
from typing import Any

from numpy import float32

from ..ops import ACTIVATIONS
from .target import THREADS, blocks_for, cuda, kernel, launch, pure_function

Array = Any

_SQRT_HALF = float32(math.sqrt(0.5))
_SQRT_2_OVER_PI = float32(math.sqrt(2 / math.pi))
_CUBIC = float32(0.044715)


@pure_function
def silu(x: Any) -> Any:
    # exp of a negative number only, so that nothing overflows.
    decay = float32(math.exp(-abs(x)))
    return x * (float32(1) if x >= float32(0) else decay) / (float32(1) + decay)


@pure_function
def gelu(x: Any) -> Any:
    return float32(0.5) * x * (float32(1) + float32(math.erf(x * _SQRT_HALF)))


@pure_function
def gelu_tanh(x: Any) -> Any:
    return float32(0.5) * x * (float32(1) + float32(math.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))))


def _gated_kernel(activate: Any) -> Any:
    @kernel
    def gated_activation_kernel(out: Array, gate_up: Array) -> None:
        row, i = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        size = out.shape[1]
        if i < size:
            out[row, i] = activate(gate_up[row, i]) * gate_up[row, size + i]

    return gated_activation_kernel


gated_activation_kernels = {
    "silu": _gated_kernel(silu),
    "gelu": _gated_kernel(gelu),
    "gelu_tanh": _gated_kernel(gelu_tanh),
}


@kernel
def add_kernel(out: Array, x: Array, y: Array) -> None:
    row, i = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if i < out.shape[1]:
        out[row, i] = x[row, i] + y[row, i]


@kernel
def gather_rows_kernel(out: Array, x: Array, rows: Array) -> None:
    row, i = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if i < out.shape[1]:
        out[row, i] = x[rows[row], i]


def gated_activation(out: Array, gate_up: Array, activation: str) -> None:
    """See :meth:`kernels.ops.Ops.gated_activation`."""
    if activation not in gated_activation_kernels:
        raise ValueError(f"activation={activation!r} is not allowed; allowed: {', '.join(ACTIVATIONS)}")
    launch(gated_activation_kernels[activation], _grid(out), THREADS, out, gate_up)


def add(out: Array, x: Array, y: Array) -> None:
    """See :meth:`kernels.ops.Ops.add`."""
    launch(add_kernel, _grid(out), THREADS, out, x, y)


def gather_rows(out: Array, x: Array, rows: Array) -> None:
    """See :meth:`kernels.ops.Ops.gather_rows`."""
    launch(gather_rows_kernel, _grid(out), THREADS, out, x, rows)


def _grid(out: Array) -> tuple[int, int]:
    return out.shape[0], blocks_for(out.shape[1], THREADS)
