"""paged_attention, every implementation: the same bits wherever blocks, queries and rows lie, and whoever is beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
    each_implementation,
)
from helpers.paged import MIXED, SMALL, Problem, odd_problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st


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
