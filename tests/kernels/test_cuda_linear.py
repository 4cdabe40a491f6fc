"""Linear layers of the CUDA kernels: all ways to compute one give the same bits, and cuBLAS is asked for the right product."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np
import pytest

from minipage.kernels.dtypes import to_float32
from minipage.kernels.ops import WEIGHT_KINDS, PackedWeight
from tests.helpers.kernels import IMPLEMENTATIONS, REFERENCE, assert_close, assert_same_bits, normal

Array = Any
CUDA = next((impl for impl in IMPLEMENTATIONS if impl.name.startswith("cuda")), None)
if CUDA is None:
    pytest.skip("numba-cuda and greenlet are not installed", allow_module_level=True)

from minipage.kernels.cuda import linear_blas, linear_many  # noqa: E402
from minipage.kernels.cuda.linear_parts import SPLITS, num_splits  # noqa: E402
from minipage.kernels.cuda.target import SIMULATED, scratch  # noqa: E402

dispatch = importlib.import_module("minipage.kernels.cuda.linear")  # the package has a function of that name
TENSOR_KINDS = tuple(kind for kind in WEIGHT_KINDS if kind != "float32")


def product(x: Array, weight: PackedWeight, bias: Array | None = None) -> Array:
    """What ``linear`` gives."""
    result: Array = CUDA.result("linear", (len(x), weight.shape[0]), x, weight, bias)
    return result


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("inputs", "counts"), [(70, (1, 2, 7, 8, 9, 33, 64)), (272, (1, 9))])
def test_rows_alone_and_in_company(
    kind: str, inputs: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever kernel computes a token's outputs, from one part of the inputs or several, with whichever others and in whichever
    order of threads, their bits are the same; and they are right."""
    outputs = 19
    x, bias = normal(1, 65, inputs), normal(2, outputs)
    rows = normal(3, outputs, inputs)
    weight = CUDA.weight(rows, kind)
    together = product(x, weight, bias)
    values = REFERENCE.device.ops.unpack_rows(REFERENCE.weight(rows, kind), 0, outputs)
    assert_close(together, x.astype(np.float64) @ values.T.astype(np.float64) + bias, 1e-5)
    monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", "7")
    order = np.random.default_rng(4).permutation(65)
    for count in counts:
        some = order[:count]
        assert_same_bits(product(x[some], weight, bias), together[some])


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_what_is_not_finite_stays_in_its_row(kind: str) -> None:
    """Of many tokens as of few."""
    x, weight = normal(1, 9, 40), CUDA.weight(normal(2, 5, 40), kind)
    expected = product(x, weight)
    x[2, 39], x[8, 0] = np.nan, -np.inf
    found = product(x, weight)
    assert not np.isfinite(found[[2, 8]]).any()
    assert_same_bits(np.delete(found, [2, 8], axis=0), np.delete(expected, [2, 8], axis=0))


@pytest.mark.parametrize("kind", TENSOR_KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e5])
def test_inputs_of_any_size(kind: str, scale: float) -> None:
    """Inputs much smaller and larger than 1 lose nothing, float16's range or not: their products are as exact."""
    x, rows = normal(1, 2, 64) * np.float32(scale), normal(2, 16, 64)
    values = REFERENCE.device.ops.unpack_rows(REFERENCE.weight(rows, kind), 0, 16)
    expected = x.astype(np.float64) @ values.T.astype(np.float64) / scale
    tolerance = 3e-4 if kind == "float16" and scale == 1e-6 else 1e-5  # float16 has absolute steps among the smallest
    assert_close(product(x, CUDA.weight(rows, kind)) / np.float32(scale), expected, tolerance)


def test_float16_overflows_to_infinity() -> None:
    """Beyond 2**20 an input is infinite, of its own sign, and not NaN."""
    x = np.array([[2.0**19], [2.0**21], [-(2.0**21)]], np.float32)
    found = product(x, CUDA.weight(np.ones((1, 1), np.float32), "float16"))
    assert found.tolist() == [[2.0**19], [np.inf], [-np.inf]]


def test_parts_are_as_the_shape_says() -> None:
    """Few outputs are cut into more parts, few inputs into fewer: not more than there are steps."""
    assert [num_splits(shape) for shape in ((128256, 4096), (28672, 4096), (4096, 4096), (1024, 2048))] == [1, 4, 8, 16]
    assert [num_splits((64, inputs)) for inputs in (1, 64, 65, 256, 512, 1024)] == [1, 1, 1, 4, 8, 16]
    assert SPLITS[-1] * 32 <= 1024  # threads of a block


@pytest.mark.skipif(not SIMULATED, reason="on a GPU it takes more tokens than a test has time for")
def test_many_tokens_take_little_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is computed some tokens at a time: their parts would take many times the memory of its activations."""
    asked: list[int] = []

    def recorded(name: str, size: int) -> Array:
        asked.append(size)
        return scratch(name, size)

    monkeypatch.setattr(linear_many, "scratch", recorded)
    weight = CUDA.device.ops.empty_weight((3, 256), "int8", np)
    assert np.all(product(np.ones((linear_many.SLAB + 1, 256), np.float32), weight) == 0)
    assert asked == [num_splits((3, 256)) * tokens * 3 for tokens in (linear_many.SLAB, 1)]


@pytest.mark.parametrize(("kind", "inputs"), [("int8", 2**14), ("int4", 2**15), ("int4_symmetric", 2**15)])
def test_codes_that_32_bits_cannot_count_are_refused(kind: str, inputs: int) -> None:
    """Before any memory is taken: the kernels would read others."""
    with pytest.raises(ValueError, match=rf"too large for {kind}: at most 2,147,483,647 words"):
        CUDA.device.ops.empty_weight((2**19, inputs), kind, None)


@pytest.mark.skipif(not SIMULATED, reason="the GPU's scratch memory has any content")
def test_scratch_memory_is_dirty() -> None:
    """What a kernel did not write there before it reads shows."""
    assert np.isnan(scratch("test", 5)).all()


# ---- cuBLAS ----------------------------------------------------------------------------------------------------------


DTYPES = {0: np.float32, 2: np.float16, 14: np.uint16}  #: by CUDA's numbers of element types


class FakeBlas:
    """cublasGemmEx as its documentation says, on addresses of host memory."""

    def gemmEx(self, *arguments: Any) -> None:
        """C = alpha * op(A) @ op(B) + beta * C, all of them column by column, with float32 arithmetic."""
        handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, arithmetic, algo = (
            arguments
        )
        assert (handle, arithmetic, algo, type_c) == ("handle", 68, -1, 0)
        assert lda * np.dtype(DTYPES[type_a]).itemsize % 16 == 0
        left = self.matrix(a, type_a, lda, *((k, m) if op_a else (m, k)))
        right = self.matrix(b, type_b, ldb, *((n, k) if op_b else (k, n)))
        left, right = to_float32(left.T if op_a else left), to_float32(right.T if op_b else right)
        factors = [ctypes.c_float.from_address(address).value for address in (alpha, beta)]
        result = self.matrix(c, type_c, ldc, m, n)
        result[...] = factors[0] * (left @ right) + (factors[1] * result if factors[1] else 0)

    def matrix(self, address: int, element: int, leading: int, rows: int, columns: int) -> Array:
        """The matrix there: element (i, j) is i + j * leading elements from the address."""
        assert leading >= rows
        dtype = np.dtype(DTYPES[element])
        size = ((columns - 1) * leading + rows) * dtype.itemsize
        flat = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, leading * dtype.itemsize))


@pytest.mark.skipif(not SIMULATED, reason="the stand-in for cuBLAS reads host memory")
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 13), (18, 40), (37, 72)])
def test_what_cublas_is_asked_for(kind: str, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product, with x rounded to the weight's dtype or with both in float16, some rows at a time; and the bias."""
    monkeypatch.setattr(linear_blas, "_library", lambda: (FakeBlas(), "handle"))
    monkeypatch.setattr(linear_blas, "MOST_WIDENED", 1)
    x, rows, bias = normal(1, 3, inputs), normal(2, outputs, inputs), normal(3, outputs)
    weight = CUDA.weight(rows, kind)
    exact = x.astype(np.float64) @ CUDA.device.ops.unpack_rows(weight, 0, outputs).T
    tolerance = {"float32": 1e-6, "bfloat16": 8e-3}.get(kind, 1e-3)
    for b in (None, bias):
        out = np.full((3, outputs), np.nan, np.float32)
        linear_blas.linear_blas(out, x, weight, b)
        assert_close(out, exact if b is None else exact + b, tolerance)


@pytest.mark.skipif(not SIMULATED, reason="what a GPU would do is pretended")
@pytest.mark.parametrize(
    ("tokens", "kind", "capturing", "expected"),
    [
        (257, "bfloat16", False, "linear_blas"),
        (257, "float32", False, "linear_blas"),
        (256, "bfloat16", False, "linear_many"),
        (257, "bfloat16", True, "linear_many"),
        (257, "float32", True, "linear_float32"),
        (257, "int8", False, "linear_blas"),
        (257, "int4", True, "linear_many"),
        (9, "float16", False, "linear_many"),
        (8, "int4", False, "linear_few"),
        (1, "float32", False, "linear_float32"),
    ],
)
def test_which_kernel_computes(
    tokens: int, kind: str, capturing: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS for more than 256 tokens, but not while a stream is captured."""
    called = []
    for name in ("linear_blas", "linear_few", "linear_many", "linear_float32"):
        monkeypatch.setattr(dispatch, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(dispatch, "SIMULATED", False)
    monkeypatch.setattr(dispatch, "is_capturing", lambda: capturing)
    weight = CUDA.device.ops.empty_weight((8, 8), kind, np)
    dispatch.linear(np.empty((tokens, 8), np.float32), np.empty((tokens, 8), np.float32), weight, None)
    assert called == [expected]
