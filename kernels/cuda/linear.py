"""Linear layers and the embedding."""

from __future__ import annotations

from typing import Any

from numpy import float32

from ..ops import PackedWeight
from .target import SIMULATED, THREADS, blocks_for, cuda, kernel, launch
from .weights import ELEMENTS, arrays_of

Array = Any

#: A thread block computes TILE_OUTPUTS outputs of TILE_TOKENS tokens, TILE_INPUTS inputs at a time.
TILE_OUTPUTS = 32
TILE_INPUTS = 32
TILE_TOKENS = 4 if SIMULATED else 8
PADDED = TILE_INPUTS + 1  #: so that a column of the tile lies in 32 different banks of shared memory


def _linear_kernel(element: Any) -> Any:
    """The kernel for weights whose elements are read by ``element``."""

    @kernel
    def linear_kernel(
        out: Array, x: Array, codes: Array, scales: Array, minima: Array, bias: Array, has_bias: int
    ) -> None:
        # Tiles of x and of the weight, as float32, are brought to shared memory by neighbouring threads reading
        # neighbouring inputs; then each thread adds up one output of one token, over the inputs in their order.
        x_tile = cuda.shared.array((TILE_TOKENS, TILE_INPUTS), float32)
        weight_tile = cuda.shared.array((TILE_OUTPUTS, PADDED), float32)
        lane, row = cuda.threadIdx.x, cuda.threadIdx.y
        first_output = cuda.blockIdx.x * TILE_OUTPUTS
        token, output = cuda.blockIdx.y * TILE_TOKENS + row, first_output + lane
        num_tokens, num_inputs = x.shape
        num_outputs = out.shape[1]
        total = float32(0)
        for first_input in range(0, num_inputs, TILE_INPUTS):
            i = first_input + lane
            x_tile[row, lane] = x[token, i] if token < num_tokens and i < num_inputs else float32(0)
            for n in range(row, TILE_OUTPUTS, TILE_TOKENS):
                inside = first_output + n < num_outputs and i < num_inputs
                weight_tile[n, lane] = element(codes, scales, minima, first_output + n, i) if inside else float32(0)
            cuda.syncthreads()
            if token < num_tokens:
                for k in range(TILE_INPUTS):
                    total += x_tile[row, k] * weight_tile[lane, k]
            cuda.syncthreads()
        if token < num_tokens and output < num_outputs:
            out[token, output] = total + bias[output] if has_bias else total

    return linear_kernel


def _embed_kernel(element: Any) -> Any:
    @kernel
    def embed_kernel(out: Array, codes: Array, scales: Array, minima: Array, token_ids: Array) -> None:
        token, i = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if i < out.shape[1]:
            out[token, i] = element(codes, scales, minima, token_ids[token], i)

    return embed_kernel


# One kernel a way of reading; float32, float16 and bfloat16 share theirs, which is compiled for each dtype.
_LINEAR = {element: _linear_kernel(element) for element in set(ELEMENTS.values())}
_EMBED = {element: _embed_kernel(element) for element in set(ELEMENTS.values())}
linear_kernels = {kind: _LINEAR[element] for kind, element in ELEMENTS.items()}
embed_kernels = {kind: _EMBED[element] for kind, element in ELEMENTS.items()}


def linear(out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
    """See :meth:`kernels.ops.Ops.linear`."""
    grid = blocks_for(out.shape[1], TILE_OUTPUTS), blocks_for(x.shape[0], TILE_TOKENS)
    threads = (TILE_OUTPUTS, TILE_TOKENS)
    any_row = x[0] if bias is None else bias
    launch(linear_kernels[weight.kind], grid, threads, out, x, *arrays_of(weight), any_row, int(bias is not None))


def embed(out: Array, weight: PackedWeight, token_ids: Array) -> None:
    """See :meth:`kernels.ops.Ops.embed`."""
    grid = out.shape[0], blocks_for(out.shape[1], THREADS)
    launch(embed_kernels[weight.kind], grid, THREADS, out, *arrays_of(weight), token_ids)
