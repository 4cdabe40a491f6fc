"""paged_attention, every implementation."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kernels import (
    CPU,
    PAGE_KINDS,
    REFERENCE,
    Implementation,
    assert_close,
    assert_same_bits,
    cases,
    compare,
    each_implementation,
)
from helpers.paged import Problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

Array = Any

#: Odd shapes: (query heads, kv heads), head size, block size, sequences, context.
HEADS = [(1, 1), (3, 1), (3, 3), (65, 5), (128, 8)]
HEAD_DIMS = [4, 8, 20, 33, 80, 96, 128, 256]
BLOCK_SIZES = [1, 4, 16, 32]
BATCHES = [1, 2, 33]


def contexts(block_size: int) -> list[int]:
    """Context lengths at and around the ends of blocks and of what kernels reduce at once."""
    return sorted({1, max(block_size - 1, 1), block_size, block_size + 1, 257, 1025})


def odd_problem(
    heads: tuple[int, int], head_dim: int, block_size: int, batch: int, longest: int, **more: Any
) -> Problem:
    """A problem with one sequence of the ``longest`` context, and others up to it; a few decode, a few prefill."""
    rng = random.Random(head_dim * block_size + batch + longest)
    lengths = [longest] + [rng.choice([n for n in contexts(block_size) if n <= longest]) for _ in range(batch - 1)]
    queries = [1 if rng.random() < 0.7 else rng.randint(1, min(n, 5)) for n in lengths]
    return Problem(*heads, head_dim, block_size, tuple(lengths), tuple(queries), **more)


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


SMALL = [
    Problem(1, 1, 4, 1, (1, 3), (1, 2)),
    Problem(3, 1, 33, 4, (5, 4), (1, 4)),
    Problem(4, 2, 8, 16, (17, 40), (1, 2)),
]


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


MIXED = Problem(6, 2, 20, 4, (9, 150, 40, 3), (9, 40, 1, 2))


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


@cases(
    [
        replace(p, kind=kind)
        for p in (*SMALL, MIXED, replace(MIXED, window=5), replace(MIXED, window=5, sinks=3))
        for kind in PAGE_KINDS
    ],
    [
        SMALL[1],
        replace(SMALL[2], window=3),
        replace(SMALL[2], window=3, sinks=5, block_size=4, kind="float16"),
        replace(SMALL[2], kind="bfloat16"),
    ],
)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_unused_slots_change_nothing(impl: Implementation, case: Problem, poison: float) -> None:
    """What lies in slots that hold no token of the context, or one before the window, has no effect on any bit."""
    clean = case.attend(impl)
    assert np.isfinite(clean).all()
    assert_same_bits(replace(case, fill=poison).attend(impl), clean)


@cases(
    [
        MIXED,
        replace(MIXED, window=7, kind="float16"),
        replace(MIXED, window=7, kind="int8"),
        replace(MIXED, window=7, sinks=6),
        Problem(8, 1, 64, 16, (300,), (300,)),
        Problem(3, 1, 33, 3, (300, 270), (2, 9), kind="int8"),
        Problem(3, 1, 16, 4, (400,), (300,), window=150),
    ],
    [
        SMALL[2],
        replace(SMALL[2], window=3, sinks=5),
        replace(SMALL[2], heads=8, kind="float16"),
        Problem(2, 1, 8, 4, (530, 9), (9, 2), kind="bfloat16"),
        Problem(2, 1, 8, 4, (530,), (8,), kind="float16", window=270, sinks=3),
    ],
)
def test_a_query_does_not_depend_on_its_company(impl: Implementation, case: Problem) -> None:
    """Each query has the same bits alone: another batch, another chunk, other physical blocks."""
    together = case.attend(impl)
    for s, (start, count) in enumerate(zip(np.cumsum([0, *case.queries]), case.queries, strict=False)):
        for i in range(0, count, 7):
            alone = case.part(s, case.contexts[s] - count + i + 1, 1).attend(impl)
            assert_same_bits(alone, together[start + i : start + i + 1])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Whole prompts of a few sequences, over all options."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    lengths = tuple(draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)))
    return Problem(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 40)),
        block_size=draw(st.integers(1, 33)),
        contexts=lengths,
        queries=lengths,
        window=(window := draw(st.sampled_from([0, 0, 1, 5, 64, 130]))),
        sinks=draw(st.sampled_from([0, 1, 4, 20])) if window else 0,
        soft_cap=draw(st.sampled_from([0.0, 30.0])),
        kind=draw(st.sampled_from(PAGE_KINDS)),
        fill=np.nan,
    )


@pytest.mark.parametrize("impl", [REFERENCE, CPU], ids=repr)
@settings(max_examples=40, deadline=None)
@given(problem=problems(), data=st.data())
def test_chunks_are_any_split_of_the_queries(impl: Implementation, problem: Problem, data: st.DataObject) -> None:
    """However the queries of a sequence are split into steps, they have the same bits, and the right ones."""
    together = problem.attend(impl)
    s = data.draw(st.integers(0, len(problem.contexts) - 1), label="sequence")
    context, first = problem.contexts[s], sum(problem.contexts[:s])
    stops = sorted({*data.draw(st.lists(st.integers(1, context), max_size=4), label="stops"), context})
    for start, stop in zip([0, *stops], stops, strict=False):
        part = problem.part(s, stop, stop - start).attend(impl)
        assert_same_bits(part, together[first + start : first + stop])
    assume(problem.heads * sum(problem.contexts) < 500)  # the formula is slow
    assert_close(together, problem.formula(), 1e-5)


def test_runs_repeat_bit_for_bit() -> None:
    """Twenty runs of a batch that is shared among threads are equal in all bits."""
    arguments = odd_problem((65, 5), 96, 16, 33, 257).arguments(CPU)
    outs = [np.empty_like(arguments[0]) for _ in range(20)]
    for out in outs:
        CPU.run("paged_attention", out, *arguments)
        assert_same_bits(out, outs[0])


@each_implementation
def test_long_softmax(impl: Implementation) -> None:
    """The softmax over 2,000 keys is exact to float32, also where scores are large."""
    problem = Problem(1, 1, 4 if impl.simulated else 64, 16, (300 if impl.simulated else 2000,), (1,))
    compare(impl, problem.attend, problem.formula, 1e-5)


def one_score_each(impl: Implementation, scores: Array, values: Array) -> Array:
    """Attention of one query that gives token t the score scores[t] and reads values[t]; blocks of 4 tokens."""
    count = len(scores)
    keys = np.zeros((-(-count // 4), 1, 4, 4), np.float32)
    numbers = np.zeros_like(keys)
    for t in range(count):
        keys[t // 4, 0, t % 4, 0] = scores[t]
        numbers[t // 4, 0, t % 4] = values[t]
    q = np.array([[[1, 0, 0, 0]]], np.float32)
    out = impl.array(np.full(q.shape, np.nan, np.float32))
    lengths = np.arange(len(keys), dtype=np.int32)[None], np.array([count], np.int32), np.array([0, 1], np.int32)
    pages = impl.key_pages(keys, "float32"), impl.value_pages(numbers, "float32")
    impl.run("paged_attention", out, impl.array(q), *pages, *map(impl.array, lengths), 1.0, 0, 0.0)
    return impl.host(out)[0, 0]


@each_implementation
@pytest.mark.parametrize("count", [5, 40, 300])
def test_scores_of_minus_infinity_have_no_weight(impl: Implementation, count: int) -> None:
    """Also where a whole chunk of the context has no other score; and NaN, not a number, where nothing has."""
    scores = np.full(count, -np.inf, np.float32)
    values = np.arange(count, dtype=np.float32)
    assert np.isnan(one_score_each(impl, scores, values)).all()
    scores[-2:] = 1.0
    np.testing.assert_allclose(one_score_each(impl, scores, values), count - 1.5)
    np.testing.assert_allclose(one_score_each(impl, scores[::-1], values), 0.5)


@each_implementation
@pytest.mark.parametrize("count", [5, 300])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_scores_and_values_show(impl: Implementation, count: int, bad: float) -> None:
    """A NaN in the context, or an infinity that a softmax cannot weigh, comes out as NaN and is not hidden."""
    scores, values = np.zeros(count, np.float32), np.ones(count, np.float32)
    for place in (0, count // 2, count - 1):
        broken = scores.copy()
        broken[place] = bad
        assert np.isnan(one_score_each(impl, broken, values)).all()
    whole_chunk = scores.copy()
    whole_chunk[: count // 2] = np.nan
    assert np.isnan(one_score_each(impl, whole_chunk, values)).all()
    broken = values.copy()
    broken[1] = bad
    assert not np.isfinite(one_score_each(impl, scores, broken)).any()


@each_implementation
def test_large_scores(impl: Implementation) -> None:
    """Scores of +-1e4 neither overflow nor lose the largest."""
    scores, values = np.linspace(-1e4, 1e4, 41).astype(np.float32), np.arange(41, dtype=np.float32)
    np.testing.assert_allclose(one_score_each(impl, scores, values), 40)
    np.testing.assert_allclose(one_score_each(impl, scores[::-1], values), 0)


@each_implementation
def test_rows_that_no_sequence_owns_are_left(impl: Implementation) -> None:
    """A sequence may have no queries, and out rows beyond the last query stay as they are."""
    problem = Problem(contexts=(5, 7, 9), queries=(2, 0, 1))
    q, *rest = problem.arguments(impl)
    padded = impl.array(np.concatenate([impl.host(q), np.ones((2, *q.shape[1:]), np.float32)]))
    out = impl.array(np.full(padded.shape, 7, np.float32))
    impl.run("paged_attention", out, padded, *rest)
    assert_same_bits(impl.host(out)[:3], problem.attend(impl))
    assert (impl.host(out)[3:] == 7).all()


@each_implementation
def test_queries_may_be_strided(impl: Implementation) -> None:
    """q may be some columns of a larger buffer."""
    problem = Problem(contexts=(5, 7), queries=(2, 1))
    q, *rest = problem.arguments(impl)
    buffer = impl.array(np.full((3, 7, 8), np.nan, np.float32))
    buffer[:, 1:5] = q
    out = impl.array(np.zeros((3, 4, 8), np.float32))
    impl.run("paged_attention", out, buffer[:, 1:5], *rest)
    assert_same_bits(impl.host(out), problem.attend(impl))


def test_pools_larger_than_32_bits(tmp_path: Path) -> None:
    """Blocks beyond 2^31 elements are written, read and copied where they are (on disk and sparse here: most is a hole)."""
    num_blocks, heads, size, dim = 131_074, 8, 16, 128  # 2^31 elements are 131,072 blocks
    shapes = {"k": (num_blocks, heads, dim, size), "v": (num_blocks, heads, size, dim)}
    keys, values = (np.memmap(tmp_path / name, np.float16, mode="w+", shape=shape) for name, shape in shapes.items())
    results = []
    for block in (0, num_blocks - 1):
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((5, heads, dim), dtype=np.float32) for _ in range(3))
        cos, sin = np.ones((5, 1), np.float32), np.zeros((5, 1), np.float32)
        slots = block * size + np.arange(5)
        pages = np.asarray(keys), np.asarray(values)
        CPU.run("rope_and_cache", q, k, v, cos, sin, np.arange(5, dtype=np.int32), *pages, slots)
        out = np.empty_like(q)
        lengths = np.array([[block]], np.int32), np.array([5], np.int32), np.array([0, 5], np.int32)
        CPU.run("paged_attention", out, q, *pages, *lengths, 0.1, 0, 0.0)
        results.append(out)
    assert_same_bits(results[1], results[0])
    assert np.abs(results[0]).max() > 0.1
    CPU.run("copy_blocks", keys[None], values[None], np.array([num_blocks - 1]), np.array([num_blocks - 2]))
    assert_same_bits(np.array(keys[-2]), np.array(keys[-1]))
