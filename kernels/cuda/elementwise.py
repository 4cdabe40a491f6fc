"""Ops on single elements: a thread four of them, the row by ``blockIdx.x`` and the columns by ``blockIdx.y`` and the thread."""

from __future__ import annotations

import math
from typing import Any

from numpy import float32

from ..ops import ACTIVATIONS
from .rows import Kernels, choose, for_each_access
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


_FUNCTIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def _gated_kernels(activate: Any) -> Kernels:
    def make(load: Any, store: Any) -> Any:
        @kernel
        def gated_activation_kernel(out: Array, halves: Array) -> None:
            row, i = cuda.blockIdx.x, 4 * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
            if i < out.shape[1]:
                a, b, c, d = load(halves, 2 * row, i)
                ua, ub, uc, ud = load(halves, 2 * row + 1, i)
                store(out, row, i, (activate(a) * ua, activate(b) * ub, activate(c) * uc, activate(d) * ud))

        return gated_activation_kernel

    return for_each_access(make)


def _add_kernel(load: Any, store: Any) -> Any:
    @kernel
    def add_kernel(out: Array, x: Array, y: Array) -> None:
        row, i = cuda.blockIdx.x, 4 * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if i < out.shape[1]:
            a, b, c, d = load(x, row, i)
            ya, yb, yc, yd = load(y, row, i)
            store(out, row, i, (a + ya, b + yb, c + yc, d + yd))

    return add_kernel


def _gather_rows_kernel(load: Any, store: Any) -> Any:
    @kernel
    def gather_rows_kernel(out: Array, x: Array, rows: Array) -> None:
        row, i = cuda.blockIdx.x, 4 * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if i < out.shape[1]:
            store(out, row, i, load(x, rows[row], i))

    return gather_rows_kernel


gated_activation_kernels = {name: _gated_kernels(activate) for name, activate in _FUNCTIONS.items()}
add_kernels = for_each_access(_add_kernel)
gather_rows_kernels = for_each_access(_gather_rows_kernel)


def gated_activation(out: Array, gate_up: Array, activation: str) -> None:
    """See :meth:`kernels.ops.Ops.gated_activation`. ``gate_up`` is contiguous."""
    if activation not in gated_activation_kernels:
        raise ValueError(f"activation={activation!r} is not allowed; allowed: {', '.join(ACTIVATIONS)}")
    halves = gate_up.reshape(-1, out.shape[1])
    launch(choose(gated_activation_kernels[activation], out, halves), _grid(out), THREADS, out, halves)


def add(out: Array, x: Array, y: Array) -> None:
    """See :meth:`kernels.ops.Ops.add`."""
    launch(choose(add_kernels, out, x, y), _grid(out), THREADS, out, x, y)


def gather_rows(out: Array, x: Array, rows: Array) -> None:
    """See :meth:`kernels.ops.Ops.gather_rows`."""
    launch(choose(gather_rows_kernels, out, x), _grid(out), THREADS, out, x, rows)


def _grid(out: Array) -> tuple[int, int]:
    return out.shape[0], blocks_for(out.shape[1], 4 * THREADS)
