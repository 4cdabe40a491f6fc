"""The two ways in which CUDA kernels reach rows: four elements by one access, or one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minipage.kernels.ops import ACTIVATIONS
from tests.helpers.kernels import IMPLEMENTATIONS, assert_same_bits, normal

Array = Any
CUDA = next((impl for impl in IMPLEMENTATIONS if impl.name.startswith("cuda")), None)
if CUDA is None:
    pytest.skip("numba-cuda and greenlet are not installed", allow_module_level=True)

from minipage.kernels.cuda.norm import rms_norm_kernels  # noqa: E402
from minipage.kernels.cuda.rows import choose  # noqa: E402

SIZE = 132  # more than 32 threads take at once


@pytest.fixture(autouse=True)
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated threads run in another order at each barrier."""
    monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", "1")


def unaligned(host: Array) -> Array:
    """A host array on the device, beginning at an address that is no multiple of 16 bytes."""
    room = CUDA.device.empty((host.size + 1,), host.dtype)
    array = room[1:].reshape(host.shape)
    array[...] = CUDA.array(host)
    return array


def test_which_access_is_chosen() -> None:
    """The wide one for rows of whole 16-byte pieces, contiguous and aligned, of all arrays."""
    wide, plain = rms_norm_kernels["wide"], rms_norm_kernels["plain"]
    good = CUDA.array(normal(1, 2, SIZE))
    assert choose(rms_norm_kernels, good, good[1:]) is wide
    for bad in (CUDA.array(normal(1, 2, SIZE + 1)), good[:, : SIZE - 4], unaligned(normal(1, 2, SIZE))):
        assert choose(rms_norm_kernels, good, bad) is plain


OPS = [
    ("rms_norm", (normal(1, 3, SIZE), normal(2, SIZE)), (1e-5,)),
    ("layer_norm", (normal(1, 3, SIZE), normal(2, SIZE), normal(3, SIZE)), (1e-5,)),
    ("add", (normal(1, 3, SIZE), normal(2, 3, SIZE)), ()),
    ("gather_rows", (normal(1, 5, SIZE), np.array([4, 0, 4], np.int32)), ()),
    *[("gated_activation", (normal(1, 3, 2 * SIZE),), (activation,)) for activation in ACTIVATIONS],
]


@pytest.mark.parametrize(("op", "arrays", "rest"), OPS, ids=lambda x: x if isinstance(x, str) else "")
def test_both_give_the_same_bits(op: str, arrays: tuple[Array, ...], rest: tuple[Any, ...]) -> None:
    """An op computes the same whether its arrays are aligned or not."""
    expected = CUDA.result(op, (3, SIZE), *arrays, *rest)
    out = unaligned(np.full((3, SIZE), np.nan, np.float32))
    CUDA.run(op, out, *(unaligned(x) for x in arrays), *rest)
    assert_same_bits(CUDA.host(out), expected)
