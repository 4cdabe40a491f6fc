"""paged_attention, every implementation: its formula, for shapes, storages, windows and sinks of all kinds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.kernels import (
    PAGE_KINDS,
    Implementation,
    assert_close,
    assert_same_bits,
    cases,
    compare,
    each_implementation,
)
from helpers.paged import MIXED, SMALL, Problem, contexts, odd_problem

#: Odd shapes: (query heads, kv heads), head size, block size, sequences, context.
HEADS = [(1, 1), (3, 1), (3, 3), (65, 5), (128, 8)]
HEAD_DIMS = [4, 8, 20, 33, 80, 96, 128, 256]
BLOCK_SIZES = [1, 4, 16, 32]
BATCHES = [1, 2, 33]


def odd_shapes() -> list[Problem]:
    """Every value of every axis, the others drawn anew each time."""
    rng = random.Random(0)
    axes = {"heads": HEADS, "head_dim": HEAD_DIMS, "block_size": BLOCK_SIZES, "batch": BATCHES}
    problems = []
    for axis, values in axes.items():
        for value in values * 2:
            chosen = {other: rng.choice(choices) for other, choices in axes.items()} | {axis: value}
            problems.append(odd_problem(longest=rng.choice(contexts(chosen["block_size"])), **chosen))
    for block_size in BLOCK_SIZES:
        problems += [odd_problem((3, 1), 20, block_size, 1, longest) for longest in contexts(block_size)]
    return problems


#: The values of all axes once, in few and short sequences, in every kind of pages that a simulated GPU has.
SIMULATED = [
    *SMALL,
    Problem(2, 1, 128, 4, (5,), (1,)),
    Problem(1, 1, 256, 4, (3,), (1,)),
    Problem(3, 1, 20, 4, (257,), (1,)),
    Problem(1, 1, 4, 16, (1025,), (1,)),
    Problem(7, 1, 8, 16, (1025,), (1,), kind="float16"),
    Problem(65, 5, 8, 32, (31, 33), (1, 1), kind="bfloat16"),
    Problem(128, 8, 8, 16, (17,), (1,), kind="float16"),
    Problem(2, 2, 80, 4, (4, 3), (1, 2), kind="bfloat16"),
    Problem(8, 1, 96, 16, (16, 15), (1, 3), kind="float16"),
    Problem(4, 2, 128, 1, (17,), (2,), kind="bfloat16"),
    Problem(2, 1, 136, 32, (33,), (1,), kind="float16"),
    Problem(2, 1, 256, 16, (17,), (3,), kind="float16"),
    Problem(3, 3, 33, 16, (17,), (2,), kind="float16"),
    Problem(1, 1, 8, 4, tuple(range(1, 34)), (1,) * 33, kind="float16"),
]


@cases(odd_shapes(), SIMULATED)
def test_odd_shapes(impl: Implementation, case: Problem) -> None:
    """Attention is its formula for head sizes, numbers of heads, block sizes and contexts of all kinds."""
    compare(impl, case.attend, case.formula, 1e-5)


@cases(
    [
        odd_problem(heads, dim, block_size, 2, 257, kind=kind)
        for kind in PAGE_KINDS
        for heads, dim, block_size in (((4, 2), 64, 16), ((3, 1), 33, 16), ((5, 5), 20, 1), ((7, 1), 5, 3))
    ],
    [replace(p, kind=kind) for p in (SMALL[1], replace(SMALL[2], heads=8)) for kind in PAGE_KINDS],
)
def test_storages(impl: Implementation, case: Problem) -> None:
    """Pages in 16 bits, or in 8 with scales, give what float32 pages with the same numbers give."""
    compare(impl, case.attend, case.formula, 1e-5)


@cases(
    [replace(MIXED, window=window, block_size=b) for window in (1, 2, 3, 8, 40, 128, 129) for b in (1, 4, 16)],
    [replace(SMALL[2], window=window, kind=kind) for window in (1, 3, 20) for kind in ("float32", "float16")]
    + [Problem(2, 1, 8, 4, (300,), (7,), window=40, kind="bfloat16")],
)
def test_window(impl: Implementation, case: Problem) -> None:
    """A window of W shows a token itself and the W-1 before it; blocks before it are gone (their entries are -1)."""
    compare(impl, case.attend, case.formula, 1e-5)


@cases(
    [
        replace(MIXED, window=w, sinks=k, block_size=b)
        for w in (1, 8, 40, 129)
        for k in (1, 4, 7, 130)
        for b in (1, 4, 16)
    ]
    + [replace(p, window=5, sinks=3) for p in odd_shapes()[::5]]
    + [replace(MIXED, window=9, sinks=4, kind=kind, soft_cap=20.0) for kind in PAGE_KINDS],
    [
        replace(SMALL[2], window=w, sinks=k, block_size=b, kind=kind)
        for w, k, b in ((3, 5, 4), (1, 1, 1), (20, 4, 16))
        for kind in ("float32", "float16")
    ]
    + [Problem(2, 1, 8, 4, (550,), (3,), window=20, sinks=k, kind="float16") for k in (2, 270, 600)],
)
def test_sinks(impl: Implementation, case: Problem) -> None:
    """Queries see the sinks and the window, with all keys rotated to their places in the cache (StreamingLLM)."""
    compare(impl, case.attend, case.formula, 1e-5)


@each_implementation
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_sinks_within_the_window_change_nothing(impl: Implementation, block_size: int) -> None:
    """As long as sinks and window hold the whole sequence, attention is that without either; then it is not."""
    whole = Problem(contexts=(12,), queries=(12,), block_size=block_size)
    sinks = replace(whole, window=7, sinks=4).attend(impl)
    assert_close(sinks[:11], whole.attend(impl)[:11], 1e-6)
    assert np.abs(sinks[11] - whole.attend(impl)[11]).max() > 1e-3


@cases(
    [Problem(contexts=(c,), queries=(c,), window=1, kind=kind) for c in range(1, 10) for kind in ("float32", "int8")],
    [Problem(contexts=(c,), queries=(c,), window=1, kind=k) for c in range(1, 10, 2) for k in ("float32", "float16")],
)
def test_window_of_one_is_the_value(impl: Implementation, case: Problem) -> None:
    """A token that sees itself alone gets its own value, exactly."""
    _, _, values = case.numbers(0)
    assert_same_bits(case.attend(impl), np.repeat(values, 2, axis=1))


@cases([("keys", 2), ("values", 2), ("keys", 1), ("values", 1)], [])
def test_scales_are_read_where_they_belong(impl: Implementation, case: tuple[str, int]) -> None:
    """A scale of NaN in an int8 page shows in the heads and the queries that see its token, and in no others."""
    pages, token = case
    problem = Problem(contexts=(3,), queries=(2,), kind="int8", block_size=2, kv_heads=2)
    q, keys, values, tables, *rest = problem.arguments(impl)
    clean, block, offset = problem.attend(impl), int(tables[0, token // 2]), token % 2
    if pages == "keys":
        keys[block, 1].reshape(-1)[8 * 2 + 4 * offset :][:4] = -1
    else:
        values[block, 1, offset, 8:] = -1
    out = impl.array(np.zeros_like(clean))
    impl.run("paged_attention", out, q, keys, values, tables, *rest)
    is_wrong = np.isnan(impl.host(out)).all(axis=-1)
    assert is_wrong.tolist() == [[False, False, token == 1, token == 1], [False, False, True, True]]
    assert_same_bits(impl.host(out)[~is_wrong], clean[~is_wrong])


@cases(
    [replace(MIXED, soft_cap=cap) for cap in (0.5, 20.0, 50.0)],
    [replace(SMALL[2], soft_cap=20.0, kind=kind) for kind in ("float32", "float16")],
)
def test_soft_cap(impl: Implementation, case: Problem) -> None:
    """A cap c turns a score x into c * tanh(x / c)."""
    compare(impl, case.attend, case.formula, 1e-5)
