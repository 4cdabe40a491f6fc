"""Linear layers and the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minipage.kernels.cuda import linear_blas, linear_few, linear_float32, linear_many
from minipage.kernels.cuda.embedding import embed_kernels
from minipage.kernels.cuda.linear_operands import EIGHT
from minipage.kernels.cuda.linear_parts import SPLITS, num_splits
from minipage.kernels.cuda.target import THREADS, WARP, blocks_for
from minipage.kernels.cuda.weights import TILE

from .specimens import F32, FLOATS, I64, IDS, ROWS, U32, VECTOR, Launch, Specimen, array

BITS = {"float32": 32.0, "float16": 16, "bfloat16": 16, "int8": 8.5, "int4": 5, "int4_symmetric": 4.5}  #: of a weight
HIDDEN = 4096  #: elements of a row
#: Outputs and inputs of the layers that are reported.
SHAPES = ((4096, 4096), (28672, 4096), (1024, 2048), (128256, 4096))


def packed(kind: str) -> tuple[Any, Any, Any]:
    """The types of codes, scales and minima."""
    codes = array(FLOATS.get(kind, U32), 2)
    return codes, codes, codes


def launch_of(tokens: int, shape: tuple[int, int], kind: str, blocks: int) -> Launch:
    """A launch that reads a weight, and has float32 inputs and outputs."""
    outputs, inputs = shape
    num_bytes = outputs * inputs * BITS[kind] / 8 + 4 * tokens * (outputs + inputs)
    return Launch(f"{tokens} rows, {outputs} x {inputs}", blocks, int(num_bytes))


def specimens() -> Iterator[Specimen]:
    """Each kernel for each kind of weights and by both accesses to x; of those for few tokens, not each number of parts."""
    for kind, by_access in linear_many.many_kernels.items():
        for access, by_tokens in by_access.items():
            yield _few(kind, 8, access)
            for log_tokens in by_tokens:
                yield _many(kind, log_tokens, access)
    for splits in (1, 4, 16):
        yield _few("bfloat16", splits, "wide")
    signature, merge = (ROWS, VECTOR, I64, F32, VECTOR, I64), linear_many.merge_parts_kernel
    yield Specimen("merge_parts", merge, signature, THREADS, _rows("32 rows of 4096, in 4 parts", 32, 1, 4 * 4 + 4))
    for access in ("wide", "plain"):
        yield from _others(access)


def _rows(shape: str, rows: int, each: int, num_bytes: float) -> Launch:
    """A launch over rows of HIDDEN elements: what a thread has of a row, and the bytes that are moved for one."""
    return Launch(shape, rows * blocks_for(HIDDEN, each * THREADS), int(rows * HIDDEN * num_bytes))


def _few(kind: str, splits: int, access: str) -> Specimen:
    """The kernel for few tokens for a number of parts."""
    signature = (ROWS, ROWS, *packed(kind), VECTOR, I64, I64)
    shape = next(shape for shape in SHAPES if num_splits(shape) == splits)
    launch = launch_of(1, shape, kind, blocks_for(shape[0], TILE))
    kernel, name = linear_few.few_kernels[kind][splits][access], f"linear {kind} few, {splits} parts {access}"
    fills_gpu = splits < SPLITS[-1]  # only layers of few outputs are cut into the most parts
    return Specimen(name, kernel, signature, splits * WARP, launch, True, True, fills_gpu)


def _many(kind: str, log_tokens: int, access: str) -> Specimen:
    """The kernel for many tokens, so many at once."""
    signature, threads = (VECTOR, ROWS, *packed(kind), I64), linear_many.WARPS * WARP
    tokens, shape = 1 << log_tokens, SHAPES[0]
    blocks = blocks_for(shape[0], TILE * linear_many.WARPS) * num_splits(shape)
    launch = launch_of(tokens, shape, kind, blocks)
    kernel, name = linear_many.many_kernels[kind][access][log_tokens], f"linear {kind} {tokens} at once {access}"
    return Specimen(name, kernel, signature, threads, launch, True, True, fills_gpu=True)


def _others(access: str) -> Iterator[Specimen]:
    """float32, what is around cuBLAS, and the embedding; with plain access, of one kind."""
    is_wide = access == "wide"
    most = linear_float32.MOST_LOG_TOKENS[access]
    for log_tokens in (0, most) if is_wide else (most,):
        tokens, shape = 1 << log_tokens, SHAPES[0]
        signature, threads = (ROWS, ROWS, ROWS, VECTOR, I64), linear_float32.WARPS * WARP
        launch = launch_of(tokens, shape, "float32", blocks_for(shape[0], linear_float32.ROWS))
        kernel, name = linear_float32.float32_kernels[access][log_tokens], f"linear float32 {tokens} at once {access}"
        yield Specimen(name, kernel, signature, threads, launch, True, fills_gpu=True)
    prompt, signature = "512 rows of 4096", (ROWS, ROWS)
    launch, kernel = _rows(prompt, 512, 4, 4 + 4), linear_blas.add_bias_kernels[access]
    yield Specimen(f"add_bias {access}", kernel, signature, THREADS, launch, is_wide)
    for kind in linear_blas.narrow_kernels if is_wide else ("float16",):
        launch, kernel = _rows(prompt, 512, EIGHT, 4 + 2), linear_blas.narrow_kernels[kind][access]
        yield Specimen(f"narrow {kind} {access}", kernel, (VECTOR, ROWS, I64), THREADS, launch, is_wide)
    for kind, kernel in linear_blas.widen_kernels.items() if is_wide else ():
        launch = _rows("4096 rows of 4096", 4096, EIGHT, BITS[kind] / 8 + 2)
        yield Specimen(f"widen {kind}", kernel, (VECTOR, *packed(kind), I64, I64), THREADS, launch)
    for kind in embed_kernels if is_wide else ("int4",):
        launch, kernel = _rows("1 row of 4096", 1, EIGHT, BITS[kind] / 8 + 4), embed_kernels[kind][access]
        yield Specimen(f"embed {kind} {access}", kernel, (ROWS, *packed(kind), IDS), THREADS, launch, kind in FLOATS)
