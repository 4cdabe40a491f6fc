"""What sampling on a GPU is made of: random fractions, products with them, and searches with integer masses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minipage.kernels.philox import uniform
from tests.helpers.kernels import IMPLEMENTATIONS

Array = Any
CUDA = next((impl for impl in IMPLEMENTATIONS if impl.name.startswith("cuda")), None)
if CUDA is None:
    pytest.skip("numba-cuda and greenlet are not installed", allow_module_level=True)

from minipage.kernels.cuda.random import part_of, random_fraction  # noqa: E402
from minipage.kernels.cuda.selection import THREADS, make_find_id, make_find_rank  # noqa: E402
from minipage.kernels.cuda.target import cuda, kernel, launch, pure_function  # noqa: E402

WHOLE = 2**64
EDGES = (0, 1, 2**32 - 1, 2**32, 2**63, WHOLE - 1)


@pytest.fixture(autouse=True)
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated threads run in another order at each barrier."""
    monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", "1")


def run(function: Any, *arrays: Array) -> Array:
    """One block of a kernel on copies of host arrays; the first comes back."""
    on_device = [CUDA.array(x) for x in arrays]
    with CUDA.device.compute():
        launch(function, (1,), THREADS, *on_device)
    return CUDA.host(on_device[0])


def test_random_fractions() -> None:
    """They are philox's uniforms, all 53 bits of them."""

    @kernel
    def fractions(out: Array, seeds: Array, children: Array, positions: Array) -> None:
        if (i := cuda.threadIdx.x) < len(out):
            out[i] = random_fraction(seeds[i], children[i], positions[i])

    seeds = [*EDGES, *np.random.default_rng(1).integers(0, 2**63, 20).tolist()]
    children, positions = ([(i * k) % 2**32 for i in range(len(seeds))] for k in (12345, 987654321))
    arrays = [np.array(x, np.uint64) for x in (seeds, children, positions)]
    found = run(fractions, np.zeros(len(seeds), np.uint64), *arrays).tolist()
    expected = [uniform(*each) for each in zip(seeds, children, positions, strict=True)]
    assert found == [round(u * WHOLE) for u in expected]


def test_parts() -> None:
    """A total of up to 63 bits times a fraction of 64, rounded down."""

    @kernel
    def parts(out: Array, totals: Array, fractions: Array) -> None:
        if (i := cuda.threadIdx.x) < len(out):
            out[i] = part_of(totals[i], fractions[i])

    pairs = [(total, fraction) for total in (0, 1, 2**31, 2**40 + 12345, 2**63 - 1) for fraction in EDGES]
    totals, fractions = zip(*pairs, strict=True)
    found = run(parts, np.zeros(len(pairs), np.int64), np.array(totals, np.int64), np.array(fractions, np.uint64))
    assert found.tolist() == [total * fraction // WHOLE for total, fraction in pairs]


@pure_function
def whole(x: Any, i: Any, limits: Any) -> Any:
    """A mass that is written as a float; ``limits`` is a factor."""
    return np.int64(x) * limits


@pure_function
def by_last_digits(x: Any, i: Any, limits: Any) -> Any:
    """The same masses, ranked by the ids from the end."""
    return limits * 0 + 3 * (1000 - i), np.int64(x) * limits


find_id, find_rank = make_find_id(whole), make_find_rank(by_last_digits)


@kernel
def search(out: Array, masses: Array, factors: Array, targets: Array, fractions: Array) -> None:
    """In row 0, the id, the rank, what is left of the target there and the mass there, for each of some targets."""
    for i in range(len(targets)):
        place = find_id(masses, 0, factors[0], targets[i], fractions[i])
        rank, left, mass = find_rank(masses, 0, factors[0], 32, targets[i], fractions[i])
        if cuda.threadIdx.x == 0:
            out[i, 0], out[i, 1], out[i, 2], out[i, 3] = place, rank, left, mass


@pytest.mark.parametrize("size", [1, 3, 70, 200])
@pytest.mark.parametrize("factor", [1, 2**31, 2**41 + 7])
def test_searches(size: int, factor: int) -> None:
    """The token at which a target is reached is never one without mass, be the target the first unit or the last."""
    masses = np.random.default_rng(size).integers(0, 3, size)
    masses[0] = masses[-1] = 0
    masses[size // 2] = 2
    total = int(masses.sum()) * factor
    targets = [1, factor, factor + 1, total - 1, total, 0, 0, 0]
    fractions = [0] * 5 + [0, WHOLE - 1, WHOLE // 3]
    arrays = masses[None].astype(np.float32), np.array([factor]), np.array(targets), np.array(fractions, np.uint64)
    found = run(search, np.zeros((8, 4), np.int64), *arrays)
    forwards, backwards = np.cumsum(masses * factor), np.cumsum(masses[::-1] * factor)
    for row, target, fraction in zip(found.tolist(), targets, fractions, strict=True):
        above = target or total * fraction // WHOLE + 1
        assert row[0] == int((forwards < above).argmin())
        reached = target or max(1, total * fraction // WHOLE)
        place = int((backwards < reached).argmin())
        mass = int(masses[::-1][place]) * factor
        assert row[1:] == [3 * (1000 - (size - 1 - place)), reached - int(backwards[place]) + mass, mass]
