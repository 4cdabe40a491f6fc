"""Wide accesses, pairs of 16-bit floats and matrix products of the CUDA kernels, in the simulator or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minipage.kernels.dtypes import convert, to_float32
from tests.helpers.kernels import IMPLEMENTATIONS, assert_same_bits, normal

Array = Any
CUDA = next((impl for impl in IMPLEMENTATIONS if impl.name.startswith("cuda")), None)
if CUDA is None:
    pytest.skip("numba-cuda and greenlet are not installed", allow_module_level=True)

from minipage.kernels.cuda.intrinsics import (  # noqa: E402
    bits_float,
    element_at,
    exp2,
    float_bits,
    hidden,
    load16,
    load_matrices,
    load_matrices_transposed,
    mma_bfloat16,
    mma_half,
    multiply,
    multiply_add,
    pack_bfloat16,
    pack_half,
    permute_bytes,
    store16,
    stream16,
    unpack_bfloat16,
    unpack_half,
)
from minipage.kernels.cuda.target import SIMULATED, cuda, kernel, launch  # noqa: E402


def run(function: Any, *arrays: Array) -> list[Array]:
    """One warp of a kernel on copies of host arrays, which come back."""
    on_device = [CUDA.array(x) for x in arrays]
    with CUDA.device.compute():
        launch(function, (1,), 32, *on_device)
    return [CUDA.host(x) for x in on_device]


@pytest.mark.parametrize("load", [load16, stream16])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16, np.int8])
def test_wide_copies(dtype: Any, load: Any) -> None:
    """Sixteen bytes are moved as they are, whatever the type."""

    @kernel
    def copy(out: Array, x: Array) -> None:
        offset = cuda.threadIdx.x * (16 // x.itemsize)
        store16(out, offset, load(x, offset))

    x = np.random.default_rng(1).integers(0, 256, 512).astype(np.uint8).view(dtype)
    assert_same_bits(run(copy, np.zeros_like(x), x)[0].view(np.uint8), x.view(np.uint8))


@pytest.mark.skipif(not SIMULATED, reason="a GPU reads on")
@pytest.mark.parametrize(("offset", "error"), [(2, ValueError), (128, IndexError), (-4, IndexError)])
def test_the_simulator_refuses_wrong_offsets(offset: int, error: type[Exception]) -> None:
    """Sixteen bytes that are not aligned, or not of the array."""

    @kernel
    def read(x: Array) -> None:
        load16(x, offset)

    with pytest.raises(error):
        run(read, np.zeros(128, np.float32))


@pytest.mark.skipif(not SIMULATED, reason="on a GPU it depends on what else is in shared memory")
def test_shared_memory_is_aligned_where_that_is_asked_for() -> None:
    """Sixteen bytes of shared memory at once are refused unless its array was asked to begin at a multiple of them."""

    @kernel
    def plain(x: Array) -> None:
        load16(cuda.shared.array(32, np.float32), 4)

    @kernel
    def aligned(x: Array) -> None:
        shared = cuda.shared.array(32, np.float32, alignment=16)
        shared[4] = 7
        x[0] = bits_float(load16(shared, 4)[0])

    with pytest.raises(ValueError, match="does not lie at a multiple of 16 bytes"):
        run(plain, np.zeros(1, np.float32))
    assert run(aligned, np.zeros(1, np.float32))[0] == 7


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_pairs(kind: str) -> None:
    """A word is two floats, the low one first, and is packed with the rounding of the host."""
    unpack, pack = (unpack_half, pack_half) if kind == "float16" else (unpack_bfloat16, pack_bfloat16)

    @kernel
    def both(words: Array, unpacked: Array, bits: Array, x: Array) -> None:
        i = cuda.threadIdx.x
        words[i] = pack(x[i, 0], x[i, 1])
        unpacked[i, 0], unpacked[i, 1] = unpack(words[i])
        bits[i] = float_bits(bits_float(float_bits(x[i, 0])))

    x = normal(1, 32, 2)
    words, unpacked, bits, _ = run(both, np.zeros(32, np.uint32), np.zeros_like(x), np.zeros(32, np.uint32), x)
    assert_same_bits(words.view(np.uint16), convert(x, kind).view(np.uint16).reshape(-1))
    assert_same_bits(unpacked, to_float32(convert(x, kind)))
    assert_same_bits(bits, x[:, 0].copy().view(np.uint32))


def test_bytes_and_elements() -> None:
    """The bytes that the selector names, the last digit first; elements by their place in memory."""

    @kernel
    def read(out: Array, x: Array) -> None:
        i = cuda.threadIdx.x
        out[i] = permute_bytes(element_at(x, i), element_at(x, 63 - i), np.uint32(0x7250))

    x = np.random.default_rng(1).integers(0, 1 << 32, (4, 16)).astype(np.uint32)
    a, b = x.reshape(-1)[:32], x.reshape(-1)[:31:-1]
    expected = np.stack(
        [a.view(np.uint8)[0::4], b.copy().view(np.uint8)[1::4], a.view(np.uint8)[2::4], b.copy().view(np.uint8)[3::4]],
        -1,
    )
    out = run(read, np.zeros(32, np.uint32), x)[0]
    assert_same_bits(out.view(np.uint8), np.ascontiguousarray(expected).reshape(-1))


def test_multiply_add_rounds_once() -> None:
    """The product is exact: of (1 + e)**2 - (1 + 2e), e**2 is left."""

    @kernel
    def compute(out: Array, x: Array) -> None:
        i = cuda.threadIdx.x
        out[i] = multiply_add(x[i], x[i], -(x[i] + x[i] - np.float32(1)))

    e = np.float32(2.0) ** -np.arange(13, 23).repeat(4)[:32].astype(np.float32)
    assert_same_bits(run(compute, np.zeros(32, np.float32), np.float32(1) + e)[0], e * e)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_matrix_product(kind: str) -> None:
    """c + a @ b, with the fragments where the instruction wants them."""
    mma = mma_half if kind == "float16" else mma_bfloat16

    @kernel
    def product(out: Array, a: Array, b: Array, c: Array) -> None:
        g, p = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
        # a [16, 8] and b^T [8, 8] as words of two neighbours
        left = a[g, p], a[g + 8, p], a[g, p + 4], a[g + 8, p + 4]
        right = b[g, p], b[g, p + 4]
        sums = c[g, 2 * p], c[g, 2 * p + 1], c[g + 8, 2 * p], c[g + 8, 2 * p + 1]
        result = mma(sums, left, right)
        out[g, 2 * p], out[g, 2 * p + 1], out[g + 8, 2 * p], out[g + 8, 2 * p + 1] = result

    a, b, c = convert(normal(1, 16, 16), kind), convert(normal(2, 8, 16), kind), normal(3, 16, 8)
    out = run(product, np.zeros_like(c), a.view(np.uint32), b.view(np.uint32), c)[0]
    expected = c + to_float32(a).astype(np.float64) @ to_float32(b).T
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_from_shared_memory(transposed: bool) -> None:
    """Each lane gets its word of four matrices whose rows lie anywhere."""
    load = load_matrices_transposed if transposed else load_matrices

    @kernel
    def read(out: Array, x: Array) -> None:
        tile = cuda.shared.array((32, 16), np.uint16, alignment=16)  # a matrix in every other eight columns
        lane = cuda.threadIdx.x
        for i in range(8):
            tile[lane, 8 * (lane % 2) + i] = x[lane, i]
        cuda.syncthreads()
        words = load(tile, lane * 16 + 8 * (lane % 2))
        for matrix in range(4):
            out[matrix, lane] = words[matrix]

    x = np.arange(256, dtype=np.uint16).reshape(32, 8)
    out = run(read, np.zeros((4, 32), np.uint32), x)[0]
    matrices = x.reshape(4, 8, 8).transpose(0, 2, 1) if transposed else x.reshape(4, 8, 8)
    assert_same_bits(out, np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 32))


def test_products_and_powers() -> None:
    """x * y as rounded once; 2^x as near as its instruction gives it, and exact where that matters; a number as it is."""

    @kernel
    def all_of_them(products: Array, powers: Array, numbers: Array, x: Array) -> None:
        i = cuda.threadIdx.x
        products[i], powers[i], numbers[i] = multiply(x[i, 0], x[i, 1]), exp2(x[i, 0]), hidden(-5)

    x = normal(1, 32, 2) * 9
    x[:4, 0] = 0, -np.inf, np.inf, np.nan
    products, powers, numbers, _ = run(all_of_them, *np.zeros((2, 32), np.float32), np.zeros(32, np.int32), x)
    assert_same_bits(products[4:], (x[:, 0] * x[:, 1])[4:])
    np.testing.assert_array_equal(powers[:4], [1, 0, np.inf, np.nan])
    np.testing.assert_allclose(powers, np.exp2(x[:, 0].astype(np.float64)), rtol=2.5e-7)
    assert (numbers == -5).all()
