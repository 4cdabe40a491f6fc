"""What is the CUDA kernels' own in paged_attention: parts, tiles, tokens taken at once, and the kernels' variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.kernels import IMPLEMENTATIONS, REFERENCE, assert_close, assert_same_bits, normal
from helpers.paged import Problem

Array = Any
CUDA = next((impl for impl in IMPLEMENTATIONS if impl.name.startswith("cuda")), None)
if CUDA is None:
    pytest.skip("numba-cuda and greenlet are not installed", allow_module_level=True)

from minipage.kernels.cuda import attention, target  # noqa: E402

PROBLEMS = [
    Problem(4, 2, 8, 16, (17, 40), (1, 9), kind="float16", fill=np.nan),
    Problem(8, 1, 136, 16, (270,), (2,), kind="bfloat16"),
    Problem(3, 1, 72, 4, (530,), (7,), window=20, sinks=5, kind="float16", fill=np.nan),
    Problem(1, 1, 256, 16, (20,), (2,), kind="float16"),
    Problem(2, 1, 200, 1, (18,), (2,), soft_cap=9.0, kind="bfloat16"),
    Problem(3, 1, 33, 3, (259,), (4,), kind="float16"),
    Problem(7, 1, 20, 4, (40,), (4,), window=30),
]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


@each_problem
def test_tiles_and_tokens_taken_at_once(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    """Blocks of two tiles, and launches for some tokens each, give the bits of a tile a block and all tokens at once."""
    sizes = []

    def scratch(name: str, num_floats: int) -> Array:
        sizes.append(num_floats)
        return target.scratch(name, num_floats)

    monkeypatch.setattr(attention, "scratch", scratch)
    expected = problem.attend(CUDA)
    assert_close(expected, problem.attend(REFERENCE), 1e-5)
    monkeypatch.setattr(attention, "_row_tiles", lambda head_dim, *_: 2 if head_dim <= 128 else 1)
    assert_same_bits(problem.attend(CUDA), expected)
    for tokens in {1, sum(problem.queries) // 2}:
        monkeypatch.setattr(attention, "MOST_SCRATCH", sizes[0] * tokens // sum(problem.queries))
        assert_same_bits(problem.attend(CUDA), expected)
        assert sizes[-1] == attention.MOST_SCRATCH < sizes[0]


@pytest.mark.skipif(not target.SIMULATED, reason="a GPU has its own order")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("problem", PROBLEMS[::2], ids=str)
def test_order_of_threads(monkeypatch: pytest.MonkeyPatch, problem: Problem, seed: int) -> None:
    """Threads in another order compute the same bits, with one tile a block and with two: no barrier is missing."""
    expected = problem.attend(CUDA)
    monkeypatch.setenv("MINIPAGE_SIMULATOR_SEED", str(seed))
    assert_same_bits(problem.attend(CUDA), expected)
    monkeypatch.setattr(attention, "ENOUGH_BLOCKS", 0)
    assert_same_bits(problem.attend(CUDA), expected)


def test_tiles_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two where sequences have more rows than one tile, and that leaves enough blocks to fill a GPU; else one."""
    monkeypatch.setattr(attention, "ENOUGH_BLOCKS", 2)
    problem, chosen = Problem(4, 2, 8, 7, (9,), (8,), kind="float16"), []
    some, decodes = replace(problem, queries=(7,)), replace(problem, contexts=(9,) * 8, queries=(1,) * 8)
    for case in (problem, some, decodes, replace(problem, head_dim=136)):
        monkeypatch.setattr(attention, "kernels", {})
        case.attend(CUDA)
        chosen += [key[-1].row_tiles for key in attention.kernels]
    assert chosen == [2, 1, 1, 1]


@pytest.mark.parametrize("exponent", [-100, -20, 20, 60])
def test_queries_of_any_size(exponent: int) -> None:
    """Queries beyond the range of float16 are split without overflow or loss: the scale makes up for their size."""
    problem = Problem(4, 2, 16, 4, (9,), (2,), kind="float16")
    q, *rest = problem.arguments(CUDA)
    expected = problem.attend(REFERENCE)
    big = CUDA.array(np.ldexp(CUDA.host(q), exponent))
    out = CUDA.array(np.full(expected.shape, np.nan, np.float32))
    rest[5] = float(np.ldexp(problem.scale, -exponent))
    CUDA.run("paged_attention", out, big, *rest)
    assert_close(CUDA.host(out), expected, 1e-5)


def test_kernels_follow_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores compute with 16-bit pages of heads of a multiple of 8 dims, whatever the number of queries."""
    chosen = []
    for head_dim, kind in ((8, "float16"), (20, "float16"), (8, "float32")):
        monkeypatch.setattr(attention, "kernels", {})
        for queries in (1, 5):
            Problem(2, 1, head_dim, 5, (7,), (queries,), kind=kind).attend(CUDA)
        chosen.append([key[:3] for key in attention.kernels])
    assert chosen == [[("float16", True, True)], [("float16", False, True)], [("float32", True, True)]]


def test_tables_may_be_wider_than_the_view() -> None:
    """Block tables are some columns of a larger buffer."""
    problem = Problem(contexts=(9, 5), queries=(2, 1), kind="float16")
    q, keys, values, tables, *rest = problem.arguments(CUDA)
    buffer = CUDA.array(np.full((2, 50), -1, np.int32))
    buffer[:, : tables.shape[1]] = tables
    out = CUDA.array(np.zeros(q.shape, np.float32))
    CUDA.run("paged_attention", out, q, keys, values, buffer[:, : tables.shape[1]], *rest)
    assert_same_bits(CUDA.host(out), problem.attend(CUDA))


def test_heads_that_do_not_begin_at_16_bytes() -> None:
    """Queries anywhere in a buffer give the bits of those that can be read 16 bytes at a time."""
    problem = Problem(contexts=(9, 5), queries=(2, 1), kind="float16")
    q, *rest = problem.arguments(CUDA)
    buffer = CUDA.array(np.full((3, 4, 11), np.nan, np.float32))
    buffer[:, :, 3:] = q
    out = CUDA.array(np.zeros(q.shape, np.float32))
    CUDA.run("paged_attention", out, buffer[:, :, 3:], *rest)
    assert_same_bits(CUDA.host(out), problem.attend(CUDA))


def test_too_large_heads() -> None:
    """A head size that no kernel takes is an error that says so."""
    with pytest.raises(ValueError, match="head size 257 is too large"):
        replace(PROBLEMS[0], head_dim=257).attend(CUDA)


def test_pages_that_are_views() -> None:
    """Pages that do not lie in one piece are refused, and not copied."""
    q, keys, *rest = Problem(kind="float16").arguments(CUDA)
    with pytest.raises(ValueError, match="not contiguous; allowed: C order"):
        CUDA.run("paged_attention", q, q, keys[:, :, ::2], *rest)


def test_runs_repeat_bit_for_bit() -> None:
    """Runs of the same call are equal in all bits."""
    arguments = PROBLEMS[0].arguments(CUDA)
    outs = [CUDA.array(normal(1, *arguments[0].shape)) for _ in range(3 if CUDA.simulated else 20)]
    for out in outs:
        CUDA.run("paged_attention", out, *arguments)
        assert_same_bits(CUDA.host(out), CUDA.host(outs[0]))
